"""Benchmarks of elastic training."""
