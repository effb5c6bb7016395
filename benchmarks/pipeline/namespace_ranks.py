"""Run a function on ranks that are processes in network namespaces and communicate over Gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.pipeline.namespaces import NodeAddresses, enter

PORT = 29617
"""Port of rank 0, at which ranks meet. Each node has its own ports, so it cannot be in use."""

T = TypeVar("T")


def run_in_namespaces(places: Sequence[NodeAddresses], function: Callable[..., T], *arguments: Any) -> list[T]:
    """Call ``function(*arguments)`` on one rank for each place; its results, by rank.

    Ranks are forked from this process and have one thread each. Their default process group uses the NIC "eth0", and so
    do groups that ``function`` makes without another choice. Results must be picklable.

    Args:
        places: the node of each rank.

    Raises:
        RuntimeError: a rank failed. Each rank that stopped has printed its traceback.
    """
    context = mp.get_context("fork")
    pipes, processes = [], []
    for rank in range(len(places)):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(sender, rank, places, function, arguments), daemon=True))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        return [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError("a rank failed; the tracebacks of all ranks that stopped are printed above") from None


def _rank(
    pipe: Connection,
    rank: int,
    places: Sequence[NodeAddresses],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Connect this process to the others, and send the result of ``function`` through ``pipe``."""
    try:
        enter(places[rank].namespace)
        torch.set_num_threads(1)
        local_rank = places[:rank].count(places[rank])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(len(places))}
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        master = f"tcp://{places[0].ethernet}:{PORT}"
        dist.init_process_group("gloo", master, timedelta(minutes=5), world_size=len(places), rank=rank)
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(result)
    except BaseException:
        traceback.print_exc()
    finally:
        # Exit without the clean-up of the parent process, which this process inherited.
        sys.stdout.flush()
        os._exit(0)
