"""Recovery by starting processes again: the world that torchrun gives, and states in files in memory."""
