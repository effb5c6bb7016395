"""Start ranks on this machine, one process each, and end all of them if one fails or their parent ends."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STARTED_HERE = "COLOSSAL_HETERO_STARTED_HERE"  # environment variable of ranks that :func:`start_ranks` started
START_METHOD = "spawn"
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # here, because a process that was just forked must not load it


def is_rank() -> bool:
    return "RANK" in os.environ


def end_with_parent() -> None:
    """Let this process be killed when its parent ends, also after ``exec``. Forks of it are not. Linux only."""
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def local_devices(ranks_on_cpu: int = 1) -> int:
    import torch

    return torch.cuda.device_count() or ranks_on_cpu


def local_gpu(rank: int, action: str) -> torch.device | None:
    """The GPU of this rank, which becomes torch's current one; None on a machine without GPUs."""
    import torch

    if not torch.cuda.is_available():
        return None
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {rank} has local rank {local_rank}, but its machine has {torch.cuda.device_count()} GPUs; start one "
            f"rank per GPU, or {action} CPUs with CUDA_VISIBLE_DEVICES= in front of the command"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def start_ranks(count: int, run: Callable[..., object], *arguments: object) -> None:
    """Call ``run(*arguments)`` in ``count`` processes. If it raises or one is ended, all end, and a ``ValueError`` says
    why."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells which processes it ends
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))  # torch reads it when it is imported
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    try:
        start_processes(_rank, (count, port, os.getpid(), run, arguments), count, start_method=START_METHOD)
    except ProcessRaisedException as error:
        kind, _, words = str(error).strip().splitlines()[-1].partition(": ")
        reason = words or kind
        is_named = error.error_index == 0 or reason.startswith("rank ")
        raise ValueError(reason if is_named else f"rank {error.error_index}: {reason}") from None
    except ProcessExitedException as error:
        how = f"ended with status {error.exit_code}"
        if error.exit_code < 0:
            how = f"was ended by signal {-error.exit_code}"
        raise ValueError(f"rank {error.error_index} {how}; the other ranks were stopped") from None


def _rank(rank: int, count: int, port: int, parent: int, run: Callable[..., object], arguments: Any) -> None:
    end_with_parent()
    if os.getppid() != parent:
        return  # it ended while this process was starting
    if rank != 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    world |= {STARTED_HERE: 1, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in world.items()})
    run(*arguments)
