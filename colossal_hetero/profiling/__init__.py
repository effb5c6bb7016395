"""Measure models and devices, with model, optimizer and random state restored afterwards."""
