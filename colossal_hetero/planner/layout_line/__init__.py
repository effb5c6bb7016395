"""One-line layouts of plans: what they say, written and read."""
