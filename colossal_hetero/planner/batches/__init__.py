"""Divide a global batch over devices that are not equally fast: time curves, exact search, rules, device dropping."""
