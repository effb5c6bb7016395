"""Saving layer checkpoints in the background."""
