"""Costs of a model's layers on each kind of device: measured, or estimated from sizes."""
