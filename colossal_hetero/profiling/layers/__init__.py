"""Profile the layers of a model: times, sizes and memory of its blocks."""
