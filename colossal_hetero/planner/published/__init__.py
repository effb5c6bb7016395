"""Measurements published by other authors, and what is estimated from them. Used by benchmarks and tests only."""
