"""Functions that all ranks call, and what processes need of their groups."""

from __future__ import annotations

import functools
import os
import re
import socket
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .text import print_words

_LOST = re.compile(
    r"gloo|nccl|connection|broken pipe|socket|by peer|remote process|tcpstore|communicator", re.IGNORECASE
)


def is_lost_connection(words: str) -> bool:
    """True if an error message of a collective may mean that another rank has ended."""
    return _LOST.search(words) is not None


def slices_held(rank: int, ranks: int, copies: int) -> tuple[int, ...]:
    """The slices that a rank of a ZeRO group holds, its own first, if ``copies`` ranks hold each slice."""
    return tuple((rank + number) % ranks for number in range(min(copies, ranks)))


def own_address() -> str:
    """Address of this machine toward ``MASTER_ADDR``; a loopback address if that is here or cannot be reached."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


T = TypeVar("T")


def check_launched() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "the ranks are not connected yet: call colossalai.launch_from_torch() before you make the plugin, and "
            "start the script with torchrun, as in: torchrun --standalone --nproc-per-node 2 train.py"
        )


def of_every_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of each rank (of ``group``), by rank. Every rank calls it."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def from_rank_0(function: Callable[[], T], kind: type[ValueError] = ValueError) -> T:
    """The result of ``function``, which only rank 0 calls; every rank gets it. If ``function`` raises an error, all
    ranks raise one with the same message: the others ``kind`` if the error is of that type, else ``ValueError``."""
    answer: list[Any] = [None, None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:  # any error: the other ranks wait for the answer
            failure = error
            answer[1:] = str(error), kind if isinstance(error, kind) else ValueError
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise failure or answer[2](answer[1])
    return answer[0]  # type: ignore[no-any-return]


def print_on_rank_0(message: str) -> None:
    if dist.get_rank() == 0:
        print_words(message)


def on_every_rank(function: Callable[[], T], purpose: str) -> list[T]:
    """The results of ``function`` by rank; it is called on every rank, and must not call collectives."""
    failure: Exception | None = None
    outcome: tuple[Any, str | None]
    try:
        outcome = function(), None
    except Exception as error:
        failure, outcome = error, (None, f"{type(error).__name__}: {error}")
    everyone: list[tuple[Any, str | None]] = of_every_rank(outcome)
    failures = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(everyone) if words is not None]
    if failures:
        raise RuntimeError(f"{purpose} failed on {'; '.join(failures)}") from failure
    return [value for value, _ in everyone]


# Destroy Gloo's process groups without Python's global interpreter lock. When a collective has returned, a thread of
# Gloo still holds its tensors for a moment, and may have to release them, for which it needs the lock. The destructor
# of a group waits for these threads. ``ProcessGroup`` of torch 2.5 runs it with the lock, and then both wait forever;
# ``ProcessGroupGloo``, the backend, gives the lock back before. So the backend is kept until the group is gone. torch
# makes every group in a private function, ``_new_process_group_helper``, which is wrapped here.


@functools.cache
def destroy_without_lock() -> None:
    """Destroy all groups of this process, also those that exist already, without the lock from now on."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    for group in distributed_c10d._world.pg_map:
        _keep_backends(group)
    new_group = distributed_c10d._new_process_group_helper

    @functools.wraps(new_group)
    def kept(*args: Any, **kwargs: Any) -> Any:
        group, store = new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # and not the mark of a group that this rank is not in
            _keep_backends(group)
        return group, store

    distributed_c10d._new_process_group_helper = kept


def _keep_backends(group: dist.ProcessGroup) -> None:
    backends = [group._get_backend(device) for device in group._device_types]
    kept = [each for each in backends if isinstance(each, dist.ProcessGroupGloo)]
    weakref.finalize(group, kept.clear)


def world_timeout() -> timedelta | None:
    """Time that ranks wait for each other in the default group, for other groups; None for torch's own choice."""
    group = dist.group.WORLD
    assert group is not None
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    timeouts = [each._timeout for each in options if hasattr(each, "_timeout")]
    usual = distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend()))
    return timeouts[0] if timeouts and timeouts[0] != usual else None
