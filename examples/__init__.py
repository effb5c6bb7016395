"""Training scripts to copy from, one a folder, and what they share in ``common``."""
