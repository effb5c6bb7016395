"""Divide the blocks of a model over the stages of one pipeline."""
