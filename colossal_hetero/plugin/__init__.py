"""The Colossal-AI plugins."""
