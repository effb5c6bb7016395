"""What lies between the column-parallel and the row-parallel layer of a block."""
