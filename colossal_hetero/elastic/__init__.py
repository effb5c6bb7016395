"""Training that goes on when machines leave and join."""
