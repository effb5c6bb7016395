"""Measuring a model or a device without leaving a trace in model, optimizer or random state."""
