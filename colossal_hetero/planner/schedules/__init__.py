"""Schedules whose stages may hold several chunks of the model: orders of passes, times, memory, division of blocks."""
