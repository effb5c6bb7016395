"""Pure functions that turn measured times into a plan. They do not import torch."""
