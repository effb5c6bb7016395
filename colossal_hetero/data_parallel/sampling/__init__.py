"""Which samples each rank draws, and the seeds of their augmentation."""
