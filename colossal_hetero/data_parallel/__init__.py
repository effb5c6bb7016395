"""Uneven batches: who draws which samples, what a device holds, and how the gradients stay exact."""
