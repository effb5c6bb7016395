"""What a training loop does with the batches of a loader, and the weight that each loss must have."""
