"""Training that goes on when machines come and go."""
