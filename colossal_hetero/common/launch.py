"""Start ranks on this machine, one process each, and end all of them if one fails or their parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STARTED_HERE = "COLOSSAL_HETERO_STARTED_HERE"
"""Environment variable of ranks that :func:`start_ranks` started."""
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


def start_ranks(count: int, module: str, arguments: Sequence[str]) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    command = [sys.executable, "-m", module, *arguments]
    with _received_signals() as received, tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        shared = {
            "OMP_NUM_THREADS": str(max(1, cores // count)),
            **os.environ,
            STARTED_HERE: "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                with open(Path(folder, f"errors_{rank}"), "wb") as errors:
                    ranks.append(
                        subprocess.Popen(
                            command,
                            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdout=None if rank == 0 else subprocess.DEVNULL,
                            stderr=errors,
                        )
                    )
            _wait(ranks, Path(folder), received)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """The signals that have asked this process to end, which then does not end by itself: an exception in the handler
    could come while a rank is being started, which would then remain."""
    received: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread may set handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, received: Sequence[int]) -> None:
    while True:
        if received:
            raise SystemExit(128 + received[0])
        states = [process.poll() for process in ranks]
        if all(state == 0 for state in states):
            return
        if any(states):
            break
        time.sleep(0.05)
    failed = [rank for rank, state in enumerate(states) if state]
    # A rank that was ended by a signal is the cause of the errors of the others.
    rank = min(failed, key=lambda rank: (ranks[rank].returncode > 0, rank))
    status = ranks[rank].returncode
    if status < 0:
        raise ValueError(f"rank {rank} was ended by signal {-status}; the other ranks were stopped")
    lines = Path(folder, f"errors_{rank}").read_text(errors="replace").strip().splitlines()
    reason = lines[-1].removeprefix("Error: ") if lines else f"ended with status {status}"
    raise ValueError(reason if rank == 0 or reason.startswith("rank ") else f"rank {rank}: {reason}")
