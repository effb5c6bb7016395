"""Clocks, speeds, and the measured costs of resizing and migrating."""
