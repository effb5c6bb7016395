"""States that are kept in memory while the GPU waits for a rank that does not answer."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI before it is imported)

# isort: split
from colossalai.accelerator import get_accelerator

from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.timing import MAX_CLOCK_RATE
from colossal_hetero.checkpoint.pieces import RunState, TensorPiece, whole
from colossal_hetero.elastic.held_layers import HeldLayers
from colossal_hetero.elastic.memory_file import FileName, KeptState, MemoryFolder, StateName, read_memory_file
from colossal_hetero.elastic.state_keeper import StateKeeper

GIB = 2**30
TENSORS = 8
NEVER = 10**9
"""Steps between two states that are written although nothing happens."""
STREAMS = 64
"""More than the 32 of normal priority that torch hands out in turn."""


def state(version: int, device: torch.device, numel: int) -> KeptState:
    """A state of so many elements in all."""
    tensors = [torch.full((numel // TENSORS,), float(version + number), device=device) for number in range(TENSORS)]
    pieces = [
        TensorPiece("block-0000", f"param.{number}", tuple(each.shape), whole(each.shape), each, "tp0of1")
        for number, each in enumerate(tensors)
    ]
    return KeptState(StateName(version, "world"), (), HeldLayers(((0, 1),)), pieces, {}, RunState())


def kernels(device: torch.device, seconds: float) -> None:
    """Wait for kernels of so long on all streams of normal priority. On each a second one waits for the first."""
    if device.type != "cuda":
        time.sleep(seconds)
        return
    for stream in [torch.cuda.Stream(device) for _ in range(STREAMS)]:
        with torch.cuda.stream(stream):
            for _ in range(2):
                torch.cuda._sleep(int(seconds / 2 * MAX_CLOCK_RATE))
    torch.cuda.synchronize(device)


def late_rank(device: torch.device, seconds: float) -> None:
    """Wait in a sum for the last rank, which comes so much later."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1 << 20, device=device))
    get_accelerator().synchronize()


def keep(
    device: torch.device, wait: Callable[[torch.device, float], None], numel: int, seconds: float
) -> tuple[float, float, float, bool]:
    """Seconds to write a state while nothing else happens, and while the main thread waits; how long that waited; and
    whether the latter state can be read again."""
    dist.all_reduce(torch.ones(1 << 20, device=device))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        folder = MemoryFolder(root, "job", str(dist.get_rank()))
        folder.prepare()
        keeper = StateKeeper(folder, 0, NEVER, tidies=True)
        spent: list[float] = []

        def write() -> None:
            begin = time.perf_counter()
            assert keeper.write()
            spent.append(time.perf_counter() - begin)

        keeper.note(state(0, device, numel))
        keeper.settle()
        for version in (1, 2):
            keeper.forget()
            noted = state(version, device, numel)
            keeper.note(noted)
            get_accelerator().synchronize()
            dist.barrier()
            thread = threading.Thread(target=write)
            begin = time.perf_counter()
            if version == 1:
                write()
                continue
            # The thread begins when the device has enough to do, and the main thread waits for it.
            timer = threading.Timer(seconds / 10, thread.start)
            timer.start()
            wait(device, seconds)
            waited = time.perf_counter() - begin
            timer.join()
            thread.join()
        file = read_memory_file(folder.file(FileName(noted.name, 0)))
        keeper.close()
        is_right = file is not None and all(
            torch.equal(found.data, piece.data.cpu()) for found, piece in zip(file.pieces(), noted.pieces, strict=True)
        )
    return spent[0], spent[1], waited, is_right


def kept(
    machine: Machine, ranks: int, wait: Callable[[torch.device, float], None], numel: int, seconds: float
) -> list[Row]:
    quiet, meanwhile, waited, is_right = run_ranks(machine, ranks, keep, wait, numel, seconds)[0]
    size = numel * 4 / GIB
    return [(f"{size:.2f}", f"{quiet:.3f}", f"{meanwhile:.3f}", f"{waited:.2f}", "yes" if is_right else "**no**")]


def cases(machine: Machine) -> Sequence[Case]:
    numel, seconds = (1 << 12, 0.2) if machine.is_tiny else (1 << 29, 20.0)
    gpus = 0 if machine.is_tiny else 2
    return [
        Case("kernels on all streams", partial(kept, machine, 1, kernels, numel, seconds), 8 * GIB),
        Case("a rank that comes late", partial(kept, machine, 2, late_rank, numel, seconds), 8 * GIB, gpus=gpus),
    ]


PART = Part(
    name="keeper",
    about="""
A state is written to the machine's memory by another thread while the main thread waits for the GPU, once quietly and
once while the GPU has work that does not end soon, as if a rank had ended. *Kernels on all streams*: two on each of the
32 streams of normal priority that torch hands out, to NCCL too. *A rank that comes late*: a sum over two GPUs waits for
it. Aim: writing takes as long as if nothing else happened, and far less than the main thread waits. With
`CUDA_DEVICE_MAX_CONNECTIONS=1`, which Colossal-AI sets, streams share a queue to the GPU; the first case shows whether
the copies pass what waits there.
""",
    columns=("case", "state [GiB]", "written quietly [s]", "written meanwhile [s]", "main thread waited [s]", "right"),
    cases=cases,
)
