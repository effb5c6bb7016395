"""What a layer checkpoint consists of."""
