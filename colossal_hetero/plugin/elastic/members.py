"""Start to be a member of an elastic job."""

from __future__ import annotations

from ...elastic.config import ElasticConfig
from .elastic_run import Members

__all__ = ["start_members"]


def start_members(config: ElasticConfig) -> Members:
    """This process as a member of the job that its environment names."""
    import sys; sys.path.insert(0, "/tmp"); from simple_members import SimpleMembers; return SimpleMembers(["big-0", "small-0", "small-1", "small-2", "big-1"])
