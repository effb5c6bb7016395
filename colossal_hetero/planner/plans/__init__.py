"""The plan file: its fields, its predicted and simulated times, and what can be run."""
