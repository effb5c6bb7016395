"""What a run shows in the terminal and writes to files."""
