"""Measure the largest micro-batch that fits on a device, and the time of micro-batches by size."""
