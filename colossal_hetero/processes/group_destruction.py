"""Destroy Gloo's process groups without Python's global interpreter lock, for which their threads may wait.

When a collective has returned, a thread of Gloo still holds its tensors for a moment. If nobody else does, the thread
releases them, for which it needs the lock. The destructor of a group waits for these threads. ``ProcessGroup`` of torch
2.5 runs it with the lock, and then both wait forever. The object of the backend, ``ProcessGroupGloo``, gives the lock
back before its destructor runs. So here it is kept until the group is gone, and is therefore what ends the threads.

torch makes every group in a private function, ``_new_process_group_helper``, which is wrapped here.
"""

from __future__ import annotations

import functools
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["destroy_without_lock", "world_timeout"]


@functools.cache
def destroy_without_lock() -> None:
    """From now on, all groups of this process are destroyed without the lock, also those that exist already."""
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
    """Keep the Gloo backends of ``group`` until it is destroyed."""
    backends = [group._get_backend(device) for device in group._device_types]
    kept = [each for each in backends if isinstance(each, dist.ProcessGroupGloo)]
    weakref.finalize(group, kept.clear)


def world_timeout() -> timedelta | None:
    """How long ranks wait for each other in the default group, for other groups; None for torch's own choice."""
    group = dist.group.WORLD
    assert group is not None
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    timeouts = [each._timeout for each in options if hasattr(each, "_timeout")]
    usual = distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend()))
    return timeouts[0] if timeouts and timeouts[0] != usual else None
