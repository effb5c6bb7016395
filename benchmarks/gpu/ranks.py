"""Run a function on several ranks, which may share one GPU, and return what each of them returns."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from colossal_hetero.colossalai_support.gpu_over_gloo import support_gpus_over_gloo
from colossal_hetero.plugin.hybrid.planned_mesh import environment

from .part import Machine

__all__ = ["backend_for", "run_ranks"]

_forked = mp.get_context("forkserver")
_forked.set_forkserver_preload(["colossal_hetero.colossalai_support.accelerator"])


def backend_for(machine: Machine, world_size: int) -> str:
    """NCCL between GPUs if each rank has one of its own; Gloo if they share one, which NCCL refuses, or have none."""
    if machine.gpus >= world_size:
        return "cpu:gloo,cuda:nccl"
    return "cpu:gloo,cuda:gloo" if machine.gpus else "gloo"


def run_ranks(
    machine: Machine,
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    devices: tuple[str, ...] | None = None,
    backend: str | None = None,
    seconds: float = 300.0,
) -> list[Any]:
    """Call ``function(device, *arguments)`` on ranks with a default process group; the results, by rank.

    Args:
        machine: where the ranks run.
        world_size: number of ranks.
        function: a function at the top of a module. Its arguments and results are pickled.
        devices: device of each rank, such as ("cuda:0", "cpu"); None: each rank has a GPU of its own if there are
            enough, otherwise all share the first one, or the CPU.
        backend: of the process group; None: :func:`backend_for`.
        seconds: after this time all ranks are ended.

    Raises:
        RuntimeError: a rank failed, with its traceback.
        TimeoutError: a rank did not answer in time.
    """
    devices = devices or tuple(_device_of(machine, rank, world_size) for rank in range(world_size))
    backend = backend or backend_for(machine, world_size)
    # Forked ranks start quickly, but a process cannot use a GPU if the one that it was forked from has asked for it.
    context: Any = mp.get_context("spawn") if machine.gpus else _forked
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, receivers = [], []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                target = (rank, world_size, devices[rank], backend, store, sender, function, arguments)
                process = context.Process(target=_run_rank, args=target, daemon=True)
                # On a machine with a GPU, Colossal-AI takes a CPU only in processes that do not see the GPU.
                with environment({"CUDA_VISIBLE_DEVICES": ""} if devices[rank] == "cpu" else {}):
                    process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            return _answers(receivers, time.monotonic() + seconds, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(receivers: list[Any], deadline: float, seconds: float) -> list[Any]:
    """What the ranks returned. When one fails, the others are not waited for."""
    answers: dict[int, Any] = {}
    while len(answers) < len(receivers):
        pending = [receiver for rank, receiver in enumerate(receivers) if rank not in answers]
        ready = wait(pending, max(deadline - time.monotonic(), 0.0))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in answers]
            raise TimeoutError(f"ranks {missing} did not answer in {seconds:g} s")
        for receiver in ready:
            rank = receivers.index(receiver)
            try:
                succeeded, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                raise RuntimeError(f"the process of rank {rank} ended without an answer") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank}: {value}")
            answers[rank] = value
    return [answers[rank] for rank in range(len(receivers))]


def _run_rank(
    rank: int, world_size: int, device: str, backend: str, store: str, sender: Any, function: Callable, arguments: tuple
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    try:
        own = torch.device(device)
        if own.type == "cuda":
            torch.cuda.set_device(own)
        torch.set_num_threads(1)
        torch.manual_seed(1)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
        )
        support_gpus_over_gloo()
        result = function(own, *arguments)
        sender.send_bytes(pickle.dumps((True, result)))
        dist.barrier()
    except BaseException as error:
        lines = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        sender.send_bytes(pickle.dumps((False, lines)))


def _device_of(machine: Machine, rank: int, world_size: int) -> str:
    if machine.device.type == "cpu":
        return "cpu"
    return f"cuda:{rank if machine.gpus >= world_size else 0}"
