"""Checkpoints layer by layer, which a run with any plan can load."""
