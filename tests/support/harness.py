"""Run a function on several ranks over Gloo, each in a process of its own, and return the results of all ranks.

Processes come from a fork server that has torch and Colossal-AI loaded already, so a test with four ranks costs
tenths of a second rather than half a minute of imports.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

Rank = tuple[Any, Any]
"""A process, and the end of the pipe on which its answer arrives."""

PRELOAD = "tests.support.preload"
REPOSITORY = Path(__file__).parents[2]

_context = mp.get_context("forkserver")


def forked_context() -> Any:
    """The context of processes that come from the fork server, which is started if it does not run yet. Python has
    one, with the modules that were set last before it started, and ignores modules that it cannot import. So nothing
    else starts it (``conftest.py`` calls this first), and every rank checks what it has loaded."""
    _context.set_forkserver_preload([PRELOAD, "tests.support.elastic_jobs"])
    before = Path.cwd()
    os.chdir(REPOSITORY)
    try:
        ensure_running()
    finally:
        os.chdir(before)
    return _context


def check_preloaded() -> None:
    """Check that the fork server that started this process had loaded what tests rely on."""
    assert PRELOAD in sys.modules, f"the fork server of the tests has not loaded {PRELOAD}"


def free_port() -> int:
    """A port that nothing listens on, below those that Linux gives to outgoing connections, which could take it."""
    while True:
        port = 15_000 + secrets.randbelow(17_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _rank_main(rank: int, world_size: int, port: int, seed: int, pipe: Any, function: Callable, args: tuple) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import colossalai
    import torch

    import colossal_hetero.colossalai_support.accelerator  # noqa: F401

    torch.set_num_threads(1)
    try:
        check_preloaded()
        colossalai.launch(rank, world_size, "127.0.0.1", port, seed=seed, verbose=False)
        result = function(*args)
        torch.distributed.barrier()
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _alone_main(pipe: Any, function: Callable, arguments: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        check_preloaded()
        pipe.send_bytes(pickle.dumps((True, function(**arguments))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def run_alone(function: Callable[..., Any], timeout_seconds: float = 120, **arguments: Any) -> Any:
    """Call ``function(**arguments)`` in a new process without a process group, and return what it returns."""
    context = forked_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_alone_main, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_seconds):
            raise TimeoutError(f"{function.__name__} did not answer in {timeout_seconds} s")
        succeeded, value = answer(receiver)
    finally:
        process.kill()
        process.join()
    if not succeeded:
        raise RuntimeError(f"{function.__name__} failed:\n{value}")
    return value


@contextmanager
def start_ranks(world_size: int, function: Callable[..., Any], *args: Any, seed: int = 1024) -> Iterator[list[Rank]]:
    """Call ``function(*args)`` on ``world_size`` ranks. Yields their processes and pipes, by rank, on which each
    sends ``(True, result)`` or ``(False, traceback)``. At the end of the block, ranks that still run are killed."""
    context, port = forked_context(), free_port()
    ranks: list[Rank] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(rank, world_size, port, seed, sender, function, args), daemon=True
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        yield ranks
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()


def answer(receiver: Any) -> tuple[bool, Any]:
    return pickle.loads(receiver.recv_bytes())


def errors_of_the_others(
    world_size: int, function: Callable[..., Any], *args: Any, victim: int, seconds: float = 30
) -> list[str]:
    """Call ``function(*args)`` on ranks of which ``victim`` ends in it. Returns the tracebacks of the others, which
    must end with an error, and so do not wait for the victim."""
    errors = []
    with start_ranks(world_size, function, *args) as ranks:
        ranks[victim][0].join(60)
        assert not ranks[victim][0].is_alive(), f"rank {victim} has not ended"
        deadline = time.monotonic() + seconds
        for rank, (process, receiver) in enumerate(ranks):
            if rank == victim:
                continue
            assert receiver.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} waits for rank {victim}"
            succeeded, error = answer(receiver)
            assert not succeeded and "AssertionError" not in error, f"rank {rank}: {error}"
            errors.append(error)
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode == 1, f"rank {rank} has not ended"
    return errors


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, seed: int = 1024, timeout_seconds: float = 120
) -> list[Any]:
    """Call ``function(*args)``, a function at the top of a module, on ``world_size`` ranks and return the results by
    rank. When a rank fails, all other ranks are ended, and its traceback is raised here."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    with start_ranks(world_size, function, *args, seed=seed) as ranks:
        pending = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(pending.values())} did not answer in {timeout_seconds} s")
            for receiver in ready:
                rank = pending.pop(receiver)
                try:
                    succeeded, value = answer(receiver)
                except EOFError:
                    raise RuntimeError(f"rank {rank} of {world_size} ended without an answer") from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} of {world_size} failed:\n{value}")
                results[rank] = value
        for process, _ in ranks:
            process.join(timeout=5)
    return [results[rank] for rank in range(world_size)]
