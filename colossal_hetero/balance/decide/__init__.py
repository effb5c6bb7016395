"""Decide: pure functions from measured times to a plan. Free of torch."""
