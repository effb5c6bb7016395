"""Layer checkpoints as a part of both plugins."""
