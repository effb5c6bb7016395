"""Slow ranks and in-process shards, for experiments and for users' own tests."""
