"""How long an asynchronous save stops training, against the bare copy to host memory.

python -m benchmarks.checkpoint.stall [--megabytes 512] [--rounds 9] [--folder FOLDER]

Aim: at most the copy and 5 %. The control copies the same tensors into memory that is there already, tensor by tensor.
"in save" is the time until :meth:`save` returns. "whole stall" also has what training loses while the thread writes:
the time of the save and of the iterations until everything is written, less the time of as many undisturbed
iterations. Its control is the copy, and what training loses while another process only writes as many bytes to a file.
An iteration is matrix products on one thread; the thread that writes has another core, if there is one.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import print_table, read_options
from colossal_hetero.checkpoint.participants import gather_participants
from colossal_hetero.checkpoint.pieces import TensorPiece, whole
from colossal_hetero.checkpoint.saver import LayerCheckpointSaver

ROWS = 1024
LAYERS = 8
ITERATIONS = 20
"""For one undisturbed measurement."""


def make_pieces(megabytes: int) -> list[TensorPiece]:
    """Layers with a parameter and two moments each, so many MB in all."""
    columns = megabytes * 1_000_000 // (LAYERS * 3 * ROWS * 4)
    pieces = []
    for layer in range(LAYERS):
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            data = torch.randn(ROWS, columns)
            shape = (ROWS, columns)
            pieces.append(
                TensorPiece(f"block-{layer:04d}", f"{kind}.{layer}.weight", shape, whole(shape), data, "tp0of1")
            )
    return pieces


class Training:
    """Iterations of equal work on one thread."""

    def __init__(self, size: int = 512, products: int = 8) -> None:
        self._weight, self._products = torch.randn(size, size) / size**0.5, products
        self._state = torch.randn(size, size)

    def iterate(self) -> None:
        for _ in range(self._products):
            self._state = torch.tanh(self._state @ self._weight)

    def seconds_of_iteration(self, iterations: int) -> float:
        start = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        return (time.perf_counter() - start) / iterations

    def seconds_until(self, is_done: Callable[[], bool]) -> tuple[float, int]:
        """Iterate until it is done: the time and the number of iterations."""
        start, iterations = time.perf_counter(), 0
        while not is_done():
            self.iterate()
            iterations += 1
        return time.perf_counter() - start, iterations


def write_when_told(path: Path, size: int, told: Event, done: Event) -> None:
    """In another process: write ``size`` bytes to the file each time that ``told`` is set, then set ``done``."""
    torch.set_num_threads(1)
    data = torch.randn(size // 4).numpy()
    while True:
        told.wait()
        told.clear()
        with open(path, "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        done.set()


def seconds_of_copy(pieces: list[TensorPiece], memory: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for piece, target in zip(pieces, memory, strict=True):
        target.copy_(piece.data)
    return time.perf_counter() - start


@contextmanager
def plain_writer(folder: str, pieces: list[TensorPiece]) -> Iterator[tuple[Event, Event]]:
    """A process that writes as many bytes as the pieces have: the event that starts it, and the one that it is done."""
    context = multiprocessing.get_context("spawn")
    told, done = context.Event(), context.Event()
    size = sum(piece.data.nbytes for piece in pieces)
    process = context.Process(target=write_when_told, args=(Path(folder) / "plain", size, told, done), daemon=True)
    process.start()
    try:
        yield told, done
    finally:
        process.kill()
        process.join()


def main() -> None:
    arguments = read_options(__doc__, megabytes=512, rounds=9, folder=Path)
    torch.set_num_threads(1)
    pieces, training = make_pieces(arguments.megabytes), Training()
    memory = [torch.zeros_like(piece.data) for piece in pieces]
    copies, saves, stalls, written, disturbed = [], [], [], [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, plain_writer(folder, pieces) as (told, done):
        saver = LayerCheckpointSaver(gather_participants(pieces), local=Path(folder) / "saved", keep=1)
        for number in range(arguments.rounds + 2):
            copy = seconds_of_copy(pieces, memory)
            iteration = training.seconds_of_iteration(ITERATIONS)
            start = time.perf_counter()
            saver.save(number, pieces, ready=(True, True))
            saved = time.perf_counter() - start
            writing, iterations = training.seconds_until(lambda: saver.is_idle)
            saver.wait()
            done.clear()
            told.set()
            plain, iterations_beside_plain = training.seconds_until(done.is_set)
            if number >= 2:  # the first saves take memory
                copies.append(copy)
                saves.append(saved)
                stalls.append(saved + writing - iterations * iteration)
                written.append(saved + writing)
                disturbed.append(copy + plain - iterations_beside_plain * iteration)
        saver.close()
    copy = median(copies)
    print_table(
        f"Stall of an asynchronous save: {arguments.megabytes} MB in {len(pieces)} tensors, one rank",
        ("what", "time [ms]", "x copy"),
        [
            ("copy to host memory (control)", copy * 1000, 1.0),
            ("in save", median(saves) * 1000, median(save / each for save, each in zip(saves, copies, strict=True))),
            ("whole stall", median(stalls) * 1000, median(stalls) / copy),
            ("copy, and another process writes (control)", median(disturbed) * 1000, median(disturbed) / copy),
            ("until everything is written", median(written) * 1000, median(written) / copy),
        ],
        [f"Medians of {arguments.rounds} saves."],
    )


if __name__ == "__main__":
    main()
