"""torch's default group in a world, and what it leaves behind."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .world import World

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """torch's groups in the worlds of this process. Initialize and destroy them by turns.

    Args:
        limit_seconds: longest collective in any group, whoever makes it.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = timedelta(seconds=limit_seconds)
        self._default_limits = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
        self._hook = sys.excepthook

    def initialize(self, store: dist.Store, world: World, backend: str = "gloo") -> None:
        """Make torch's default group through keys in ``store`` that only this world uses.

        Raises:
            RuntimeError: a member died meanwhile.
        """
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = self._limit
        # torch numbers its groups, and the numbers are part of keys in the store. An initialization that failed counts.
        distributed_c10d._world.group_count = 0
        self._hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=self._limit)

    def destroy(self) -> None:
        """Destroy all groups of this process, if there are any."""
        gc.collect()  # objects that hold groups, such as plugins: Gloo closes connections when nobody holds the group
        if dist.is_initialized():
            dist.destroy_process_group()
            # torch puts the rank in front of errors that end the process, and would put all former ranks there.
            sys.excepthook = self._hook
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = self._default_limits
