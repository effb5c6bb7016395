"""What plans cost, and plans that are good for their price."""
