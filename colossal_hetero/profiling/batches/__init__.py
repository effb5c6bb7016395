"""Profile micro-batches: the largest one that fits on a device, and the time of each size."""
