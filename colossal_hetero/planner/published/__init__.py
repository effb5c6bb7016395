"""Other people's measured tables. Used by benchmarks and tests only."""
