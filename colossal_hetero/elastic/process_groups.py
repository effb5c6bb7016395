"""Workers of a world find each other; torch's default group in it, and what that leaves behind.

[Note: handshake] The keys of torch's own way (``env://``) contain how often torchrun has restarted workers after
errors. Nodes count from zero when they join, and the others do not count this, so that workers would read keys of a
former world, or wait for ever. So each worker writes a number that nobody has written before, and rank 0 writes all
that it finds. A rank that sees its own confirms it, and rank 0 starts the world when all have confirmed; until then, it
looks whether a number has changed.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import sys
import time
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..colossalai_support.accelerator import get_accelerator, quiet_import
from ..colossalai_support.cpu import forget_messages
from .world import World

PAUSE_SECONDS = 0.02


class Greeting(NamedTuple):
    token: str
    nodes: tuple[str, ...]


def find_each_other(store: Any, rank: int, size: int, node: str, limit_seconds: float) -> Greeting:
    """Find the other workers through torch's ``store``; all of them call it at once. See [Note: handshake]."""
    deadline = time.monotonic() + limit_seconds
    own = f"{secrets.token_hex(8)} {node}"
    store.set(_key(size, f"here/{rank}"), own)
    greeting = _invite(store, size, deadline) if rank == 0 else _answer(store, rank, size, own, deadline)
    if greeting is None:
        raise RuntimeError(f"not all of {size} workers came within {limit_seconds:g} s (this is rank {rank})")
    return greeting


def _invite(store: Any, size: int, deadline: float) -> Greeting | None:
    keys, there, token = [_key(size, f"here/{rank}") for rank in range(size)], list[str](), ""
    while time.monotonic() < deadline:
        if store.check(keys):
            now = [store.get(key).decode() for key in keys]
            if now != there:
                there, token = now, secrets.token_hex(8)
                store.set(_key(size, "world"), json.dumps([token, there]))
            elif all(store.check([_key(size, f"{token}/{rank}")]) for rank in range(1, size)):
                store.set(_key(size, f"{token}/start"), "1")
                return _greeting(token, there)
        time.sleep(PAUSE_SECONDS)
    return None


def _answer(store: Any, rank: int, size: int, own: str, deadline: float) -> Greeting | None:
    confirmed = ""
    while time.monotonic() < deadline:
        if store.check([_key(size, "world")]):
            token, there = json.loads(store.get(_key(size, "world")))
            if there[rank] == own:
                if token != confirmed:
                    store.set(_key(size, f"{token}/{rank}"), "1")
                    confirmed = token
                if store.check([_key(size, f"{token}/start")]):
                    return _greeting(token, there)
        time.sleep(PAUSE_SECONDS)
    return None


def _greeting(token: str, there: list[str]) -> Greeting:
    return Greeting(token, tuple(each.partition(" ")[2] for each in there))


def _key(size: int, name: str) -> str:
    return f"colossal_hetero/{size}/{name}"


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
