"""Measure the layers of a model: times, parameters and activations of its blocks and of what surrounds them."""
