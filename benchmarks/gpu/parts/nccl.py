"""NCCL: messages between ranks, communicators, and their end."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI before it is imported)

# isort: split
from colossalai.accelerator import get_accelerator

from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.parts.memory import follow, migrating
from benchmarks.gpu.ranks import backend_for, run_ranks
from benchmarks.gpu.timing import seconds_in_turns
from benchmarks.gpu.vit_training import Shape, shape_for
from colossal_hetero.layers.transport import Transport
from colossal_hetero.planner.cluster.group_networks import Network
from colossal_hetero.plugin.hybrid.planned_mesh import make_group

GIB = 2**30
MESSAGES = 16
"""Messages that are sent together or one by one."""
IMPLICIT_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"


def ranks_of(machine: Machine) -> int:
    """A rank for each GPU; without GPUs two, over Gloo."""
    return machine.gpus or 2


def library(device: torch.device) -> str:
    """What communicates, in words."""
    if device.type != "cuda" or "cuda:nccl" not in dist.get_backend_config():
        return "Gloo"
    return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))


def _rounds(device: torch.device) -> int:
    """How often everything is timed; a CPU only shows that it runs."""
    return 10 if device.type == "cuda" else 1


def _shown(seconds: float, size_bytes: int, is_right: bool, note: str) -> Row:
    speed = f"{size_bytes / seconds / 1e9:.2f}" if size_bytes else ""
    return f"{seconds * 1e3:.3f}", speed, "yes" if is_right else "**no**", note


# Messages ------------------------------------------------------------------------------------------------------------


def messages(device: torch.device, numel: int) -> list[Row]:
    """Send to the next rank and receive from the one before; with one rank, both are this one."""
    transport = Transport(dist.group.WORLD)
    transport.connect(device)
    rank, size = transport.rank, transport.size
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((numel,), float(rank), device=device) for _ in range(MESSAGES)]
    received = [torch.empty(numel, device=device) for _ in range(MESSAGES)]

    def together() -> None:
        transport.exchange([(after, each) for each in sent], [(before, each) for each in received]).wait()

    def one_by_one() -> None:
        for mine, other in zip(sent, received, strict=True):
            transport.exchange([(after, mine)], [(before, other)]).wait()

    seconds = seconds_in_turns({"together": together, "one by one": one_by_one}, device, rounds=_rounds(device))
    is_right = all(bool((each == before).all()) for each in received)
    words = f"{library(device)}, ranks: {size}"
    return [
        (f"{MESSAGES} messages {name}", *_shown(each, MESSAGES * numel * 4, is_right, words))
        for name, each in seconds.items()
    ]


def collectives(device: torch.device, numel: int) -> list[Row]:
    """A broadcast from the first rank, and a reduction to the last one."""
    transport = Transport(dist.group.WORLD)
    transport.connect(device)
    rank, size = transport.rank, transport.size
    shared, total = torch.empty(numel, device=device), torch.empty(numel, device=device)

    def broadcast() -> None:
        transport.broadcast(shared.fill_(7.0 if rank == 0 else 0.0), 0)

    def reduce() -> None:
        transport.reduce(total.fill_(1.0), size - 1)

    seconds = seconds_in_turns({"broadcast": broadcast, "reduce": reduce}, device, rounds=_rounds(device))
    right = {"broadcast": bool((shared == 7.0).all()), "reduce": rank != size - 1 or bool((total == size).all())}
    words = f"{library(device)}, ranks: {size}"
    return [(name, *_shown(seconds[name], numel * 4, right[name], words)) for name in seconds]


def transports(machine: Machine, function: Callable[[torch.device, int], list[Row]], numel: int) -> list[Row]:
    """The times of the first rank; results are right if they are on the last one too."""
    ranks = run_ranks(machine, ranks_of(machine), function, numel)
    return [
        (*first[:3], "yes" if first[3] == last[3] == "yes" else "**no**", *first[4:])
        for first, last in zip(ranks[0], ranks[-1], strict=True)
    ]


# Two communicators ---------------------------------------------------------------------------------------------------


def two_communicators(device: torch.device, numel: int, implicit_order: str | None) -> tuple[float, float, bool, str]:
    """Sum over two groups of the same ranks, in turns: seconds if each is waited for, if both are in flight, and right.

    All ranks launch the sums in the same order.
    """
    if implicit_order is not None:
        os.environ[IMPLICIT_ORDER] = implicit_order  # read when the first communicator is made
    groups = [dist.new_group() for _ in range(2)]
    tensors = [torch.ones(numel, device=device) for _ in groups]
    for tensor, group in zip(tensors, groups, strict=True):
        dist.all_reduce(tensor, group=group)

    def start() -> list[Any]:
        return [
            dist.all_reduce(tensor.fill_(1.0), group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]

    def in_flight() -> None:
        works = [work for _ in range(4) for work in start()]
        for work in works:
            work.wait()

    def waited() -> None:
        for _ in range(4):
            for tensor, group in zip(tensors, groups, strict=True):
                dist.all_reduce(tensor.fill_(1.0), group=group)

    seconds = seconds_in_turns({"waited": waited, "in flight": in_flight}, device, rounds=_rounds(device))
    waited()
    is_right = all(bool((tensor == dist.get_world_size()).all()) for tensor in tensors)
    return seconds["waited"], seconds["in flight"], is_right, f"{library(device)}, ranks: {dist.get_world_size()}"


def launch_order(machine: Machine, numel: int, implicit_order: str | None) -> list[Row]:
    waited, in_flight, is_right, words = run_ranks(
        machine, ranks_of(machine), two_communicators, numel, implicit_order
    )[0]
    size = 8 * numel * 4
    return [
        ("8 sums, each waited for", *_shown(waited, size, is_right, words)),
        ("8 sums in flight", *_shown(in_flight, size, is_right, words)),
    ]


# Making and ending ---------------------------------------------------------------------------------------------------


def made_and_ended(device: torch.device, backend: str, folder: str) -> list[tuple[str, float, bool]]:
    """Make two communicators as a planned run does, end all groups while a sum is in flight, and begin again."""
    network = Network("nccl" if "cuda:nccl" in backend else "gloo", "")
    ranks = list(range(dist.get_world_size()))
    found = []
    for name in ("first communicator", "second communicator"):
        begin = time.perf_counter()
        group = make_group(ranks, network)
        found.append((name, time.perf_counter() - begin, True))
    tensor = torch.ones(1 << 16, device=device)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    del group, work
    begin = time.perf_counter()
    dist.destroy_process_group()
    found.append(("end of all groups", time.perf_counter() - begin, True))
    begin = time.perf_counter()
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=int(os.environ["RANK"]), world_size=len(ranks)
    )
    dist.all_reduce(tensor.fill_(1.0))
    is_right = bool((tensor == len(ranks)).all())
    found.append(("beginning again", time.perf_counter() - begin, is_right))
    return found


def communicators(machine: Machine) -> list[Row]:
    size = ranks_of(machine)
    backend = backend_for(machine, size)
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(machine, size, made_and_ended, backend, folder)[0]
    return [(name, *_shown(seconds, 0, ok, f"{backend}, ranks: {size}")) for name, seconds, ok in found]


def aborted(device: torch.device, cycles: int) -> tuple[float, bool, str]:
    """Abort a communicator whose sum waits behind a long kernel; the seconds, and whether a new one works."""
    group = dist.new_group()
    tensor = torch.ones(1 << 16, device=device)
    dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(cycles)
    dist.all_reduce(tensor, group=group, async_op=True)
    backend = group._get_backend(device)
    begin = time.perf_counter()
    # torch 2.5 has only the latter, which aborts, too.
    (getattr(backend, "abort", None) or backend._shutdown)()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    dist.all_reduce(tensor.fill_(1.0))
    return seconds, bool((tensor == dist.get_world_size()).all()), library(device)


def abort(machine: Machine) -> list[Row]:
    seconds, is_right, words = run_ranks(machine, ranks_of(machine), aborted, 2_000_000_000)[0]
    return [("abort with a sum in flight", *_shown(seconds, 0, is_right, words))]


# Batches of messages -------------------------------------------------------------------------------------------------


def posted(device: torch.device, shape: Shape, iterations: int) -> tuple[float, float, float, float, str]:
    """Median seconds of an iteration without and with half of a rank's work migrated, batches of messages and messages
    in an iteration, as this rank posts them."""
    training = migrating(device, shape)
    alone = median(training.iterate() for _ in range(iterations))
    follow(training, 0.5)
    training.iterate()
    batch, batches = dist.batch_isend_irecv, 0

    def counted(operations: list[dist.P2POp]) -> list[Any]:
        nonlocal batches
        batches += 1
        return batch(operations)

    dist.batch_isend_irecv = counted
    training.plugin.balancer.traffic.reset()
    try:
        seconds = [training.iterate() for _ in range(iterations)]
    finally:
        dist.batch_isend_irecv = batch
    get_accelerator().synchronize()
    sent = training.plugin.balancer.traffic.sent["point_to_point"].messages
    return alone, median(seconds), batches / iterations, sent / iterations, library(device)


def batches_per_block(machine: Machine, shape: Shape, iterations: int, ranks: int) -> list[Row]:
    rows: list[Row] = []
    for rank, (alone, migrating_seconds, batches, sent, words) in enumerate(
        run_ranks(machine, ranks, posted, shape, iterations)
    ):
        note = f"{words}; {batches / shape.depth:g} batches and {sent / shape.depth:g} messages for each layer"
        ratio = f"half of rank {ranks - 1} migrated, {migrating_seconds / alone:.2f} of the time without"
        rows.append((f"rank {rank}", *_shown(migrating_seconds, 0, True, f"{note}; {ratio}")))
    return rows


# The part ------------------------------------------------------------------------------------------------------------


def cases(machine: Machine) -> Sequence[Case]:
    numel = 1 << 10 if machine.is_tiny else 1 << 22
    shape = shape_for(machine, Shape(width=1024, depth=4, heads=16, image=64, patch=16, batch=32))
    iterations = 1 if machine.is_tiny else 20
    in_order = partial(launch_order, machine, numel)
    return [
        Case("messages", partial(transports, machine, messages, numel), GIB),
        Case("collectives", partial(transports, machine, collectives, numel), GIB),
        Case("two communicators", partial(in_order, None), GIB),
        Case(f"two communicators, {IMPLICIT_ORDER}=0", partial(in_order, "0"), GIB, gpus=1),
        Case("communicators", partial(communicators, machine), GIB),
        Case("abort", partial(abort, machine), GIB, gpus=1),
        Case("batches for each block", partial(batches_per_block, machine, shape, iterations, 2), 4 * GIB),
        Case(
            "three receivers",
            partial(batches_per_block, machine, shape, iterations, 4),
            4 * GIB,
            gpus=0 if machine.is_tiny else 4,
        ),
    ]


PART = Part(
    name="nccl",
    about=f"""
With one GPU, NCCL has one rank: it sends to itself, and two communicators share the GPU. With more GPUs every GPU is a
rank. *Messages* are those of migrated work: {MESSAGES} of 16 MiB in one batch and one by one. *Collectives* are a
broadcast and a reduction. All results must be right. *Two communicators* have sums in flight at the same time, launched
in the same order on all ranks, as NCCL before 2.26 demands; later versions also keep that order on the device, unless
`{IMPLICIT_ORDER}` is 0. *Communicators* are made as for a planned run; then all groups end and begin again. *Abort*: a
communicator ends while its sum waits behind a long kernel; a new one must work. *Batches for each block*: two ranks
(over Gloo if they share a GPU) migrate half of the work of rank 1. A layer of the model has two blocks, attention and
MLP, each with weights and gradients. Aim: at most eight batches for each layer, so that messages are not posted one by
one. *Three receivers*: the last of four ranks gives half of its work to the others. Before its block it only sends, so
it must not wait there. Aim: its iterations take no longer than without migration.
""",
    columns=("case", "what", "time [ms]", "GB/s", "right", "note"),
    cases=cases,
)
