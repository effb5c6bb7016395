"""Pipelines whose stages are unequal: what they are planned from, and whether they run as planned."""
