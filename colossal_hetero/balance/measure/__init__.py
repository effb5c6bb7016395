"""Measure: clocks, speeds, and the costs of resizing and migrating."""
