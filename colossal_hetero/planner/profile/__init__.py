"""What a model's layers cost on each kind of device: measured, or estimated from sizes."""
