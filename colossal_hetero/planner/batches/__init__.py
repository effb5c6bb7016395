"""Divide a global batch over devices that are not equally fast."""
