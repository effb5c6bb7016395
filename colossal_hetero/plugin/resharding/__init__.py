"""What the optimizers of the hybrid plugin keep of parameters whose units change their rank for good."""
