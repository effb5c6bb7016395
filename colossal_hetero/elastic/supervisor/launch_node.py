"""Everything that ``colossal-hetero launch`` does on a node, in order."""

from __future__ import annotations

from .descendants import check_platform
from .guard import run_guarded
from .node_name import NodeName
from .supervise import Launch, Supervisor, say

__all__ = ["launch_node"]


def launch_node(launch: Launch, store_limit_seconds: float) -> int:
    """Wait for the store, take the name of the node, run its workers to their end; the exit status.

    Raises:
        ValueError: this is not Linux, or another supervisor has the name of the node in this job.
        TimeoutError: the store could not be reached within ``store_limit_seconds``.
    """
    check_platform()
    node = launch.node
    name = NodeName(node.store_host, node.store_port, node.job, node.node, say)
    name.claim(store_limit_seconds)
    try:
        return run_guarded(lambda requests: Supervisor(launch, requests).run(), name.renew)
    finally:
        name.give_back()
