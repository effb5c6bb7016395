"""How long an asynchronous save stops training, against the bare copy to host memory.

python -m benchmarks.checkpoint.stall [--megabytes 512] [--rounds 9] [--iterations 20] [--folder FOLDER]

Aim: at most the copy and 5 %. The control copies the same tensors into memory that is there already, tensor by tensor.
"in save" is the time until :meth:`save` returns. "whole stall" also has what training loses while the thread writes:
the time of the save and of the iterations until everything is written, less the time of as many undisturbed
iterations. An iteration is matrix products on one thread; the thread that writes has another core, if there is one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import print_table
from colossal_hetero.checkpoint.format.box import whole
from colossal_hetero.checkpoint.format.pieces import TensorPiece
from colossal_hetero.checkpoint.saving.participants import gather_participants
from colossal_hetero.checkpoint.saving.saver import LayerCheckpointSaver

ROWS = 1024
LAYERS = 8


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


def seconds_of_copy(pieces: list[TensorPiece], memory: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    for piece, target in zip(pieces, memory, strict=True):
        target.copy_(piece.data)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=20, help="iterations for one undisturbed measurement")
    parser.add_argument("--folder", type=Path, help="on the disk to save to; default: the folder for temporary files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pieces, training = make_pieces(arguments.megabytes), Training()
    memory = [torch.zeros_like(piece.data) for piece in pieces]
    copies, saves, stalls, written = [], [], [], []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        saver = LayerCheckpointSaver(gather_participants(pieces), local=folder, keep=1)
        for number in range(arguments.rounds + 2):
            copy = seconds_of_copy(pieces, memory)
            start = time.perf_counter()
            for _ in range(arguments.iterations):
                training.iterate()
            iteration = (time.perf_counter() - start) / arguments.iterations
            start, done = time.perf_counter(), 0
            saver.save(number, pieces)
            saved = time.perf_counter() - start
            while not saver.is_idle:
                training.iterate()
                done += 1
            total = time.perf_counter() - start
            saver.wait()
            if number >= 2:  # the first saves take memory
                copies.append(copy)
                saves.append(saved)
                stalls.append(total - done * iteration)
                written.append(total)
        saver.close()
    copy = median(copies)
    print_table(
        f"Stall of an asynchronous save: {arguments.megabytes} MB in {len(pieces)} tensors, one rank",
        ("what", "time [ms]", "x copy"),
        [
            ("copy to host memory (control)", copy * 1000, 1.0),
            ("in save", median(saves) * 1000, median(save / each for save, each in zip(saves, copies, strict=True))),
            ("whole stall", median(stalls) * 1000, median(stalls) / copy),
            ("until everything is written", median(written) * 1000, median(written) / copy),
        ],
        [f"Medians of {arguments.rounds} saves."],
    )


if __name__ == "__main__":
    main()
