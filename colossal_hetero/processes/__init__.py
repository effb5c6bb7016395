"""Ranks as processes: start them on this machine, and run a function on every rank."""
