"""Where the boxes of a checkpoint are, and from where each rank gets what it needs. Pure."""
