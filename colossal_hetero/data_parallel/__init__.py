"""Uneven data parallelism: samplers and loaders of unequal micro-batches, exact gradients, and rebalancing."""
