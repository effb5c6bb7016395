"""Units of blocks that change their rank for good, with everything that belongs to them."""
