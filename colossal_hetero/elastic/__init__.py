"""Training that goes on while machines come and go."""
