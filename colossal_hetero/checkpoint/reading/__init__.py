"""Finding layer checkpoints, and reading what a rank needs of them."""
