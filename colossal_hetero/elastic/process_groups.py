"""torch's default group in a world, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..colossalai_support.accelerator import get_accelerator, quiet_import
from ..colossalai_support.cpu import forget_messages
from .world import World


class ProcessGroups:
    """torch's groups in the worlds of this process. Initialize and destroy them by turns."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = timedelta(seconds=limit_seconds)
        self._default_limits = distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout
        self._hook = sys.excepthook

    def initialize(self, store: dist.Store, world: World, backend: str = "gloo") -> None:
        """Make torch's default group through keys in ``store`` that only this world uses."""
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = self._limit
        # torch numbers its groups, and the numbers are part of keys in the store. An initialization that failed counts.
        distributed_c10d._world.group_count = 0
        self._hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=self._limit)

    def destroy(self) -> None:
        gc.collect()  # objects that hold groups, such as plugins: Gloo closes connections when nobody holds the group
        if dist.is_initialized():
            dist.destroy_process_group()
            # torch puts the rank in front of errors that end the process, and would put all former ranks there.
            sys.excepthook = self._hook
        distributed_c10d.default_pg_timeout, distributed_c10d.default_pg_nccl_timeout = self._default_limits


# Colossalai state ----------------------------------------------------------------------------------------------------


with quiet_import():
    from colossalai.cluster import DistCoordinator
    from colossalai.context.singleton_meta import SingletonMeta
    from colossalai.shardformer.layer.utils import Randomizer
    from colossalai.tensor.d_tensor.api import clear_layout_converter
    from colossalai.utils import set_seed


class LaunchedState:
    """The state in which ``colossalai.launch`` leaves a process, for one world after the other."""

    def __init__(self, host: str, port: int, seed: int) -> None:
        self._address = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        self._seed: int | None = seed

    def enter(self, world: World) -> None:
        """Set what torchrun and ``colossalai.launch`` set. torchrun's LOCAL_RANK, which names the device, stays."""
        os.environ.update(self._address, RANK=str(world.rank), WORLD_SIZE=str(world.size))
        if self._seed is not None:
            if get_accelerator().support_set_device:
                get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
            set_seed(self._seed)
            self._seed = None
        torch._dynamo.config.optimize_ddp = world.size > 1

    def leave(self) -> None:
        SingletonMeta._instances.pop(DistCoordinator, None)
        Randomizer.reset_index()
        clear_layout_converter()
        forget_messages()
