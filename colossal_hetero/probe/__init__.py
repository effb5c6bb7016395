"""Measure the machines of the ranks (devices, memory, speed, networks) and write the cluster file."""
