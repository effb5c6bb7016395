"""What the examples share besides training: starting ranks, flags, data, and what a run shows and writes."""
