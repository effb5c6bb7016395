"""Colossal-AI's hybrid-parallel plugin with balanced layers, uneven batches and planned runs."""
