"""Paths that tests use."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLUSTERS = REPOSITORY / "examples" / "plans" / "clusters"
