"""Profiles of layers from files that other programs write."""
