"""A small model whose tensors are known for every step, divided as tensor parallelism divides it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossal_hetero.checkpoint.participants import Participants, holdings_of
from colossal_hetero.checkpoint.pieces import Box, TensorPiece, whole
from colossal_hetero.checkpoint.places import Place, find_checkpoints
from colossal_hetero.checkpoint.reader import CheckpointReader
from colossal_hetero.checkpoint.saver import LayerCheckpointSaver

SHAPES: dict[str, tuple[str, tuple[int, ...], int | None]] = {
    "embedding.weight": ("embedding", (30, 12), 0),
    **{
        f"blocks.{index}.{name}": (f"block-{index:04d}", shape, dimension)
        for index in range(2)
        for name, shape, dimension in [("up", (24, 12), 0), ("down", (12, 24), 1), ("norm", (12,), None)]
    },
    "scale": ("head", (), None),
}
"""By parameter: layer, shape, and the dimension that tensor parallelism divides."""


def tensors(step: int) -> dict[str, Tensor]:
    """All tensors of the model and its optimizer at a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        f"{kind}.{name}": torch.randn(shape, generator=generator).to(dtype)
        for kind, dtype in [("param", torch.bfloat16), ("exp_avg", torch.float32)]
        for name, (_, shape, _) in SHAPES.items()
    }


def box_of(shape: tuple[int, ...], dimension: int | None, degree: int, rank: int) -> Box:
    if dimension is None:
        return whole(shape)
    offsets, sizes = [0] * len(shape), list(shape)
    sizes[dimension] //= degree
    offsets[dimension] = rank * sizes[dimension]
    return Box(tuple(offsets), tuple(sizes))


def pieces_of(values: dict[str, Tensor], degree: int = 1, rank: int = 0, layers: str = "") -> list[TensorPiece]:
    """What a tensor-parallel rank holds of the layers whose names start with ``layers``: views of ``values``."""
    made = []
    for key, value in values.items():
        layer, shape, dimension = SHAPES[key.partition(".")[2]]
        if layer.startswith(layers):
            box = box_of(shape, dimension, degree, rank)
            data = value[whole(shape).slices_of(box)] if shape else value
            made.append(TensorPiece(layer, key, shape, box, data, f"tp{rank}of{degree}"))
    return made


def participants(nodes: Sequence[str], held: Sequence[Sequence[TensorPiece]], run: str = "run") -> list[Participants]:
    """What each of several simulated ranks knows."""
    holdings = tuple(
        holding
        for rank, (node, pieces) in enumerate(zip(nodes, held, strict=True))
        for holding in holdings_of(rank, node, pieces)
    )
    return [Participants(rank, tuple(nodes), holdings, run) for rank in range(len(nodes))]


@contextmanager
def one_saver(folder: Path, **options: Any) -> Iterator[LayerCheckpointSaver]:
    """A run of one rank that saves into a local folder, unless others are named."""
    (alone,) = participants(["a"], [pieces_of(tensors(0))], options.pop("run", "run"))
    folders = {} if {"local", "shared"} & options.keys() else {"local": folder}
    saver = LayerCheckpointSaver(alone, **folders, **options)
    try:
        yield saver
    finally:
        saver.close()


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    """Save the model at these steps."""
    with one_saver(folder, **options) as saver:
        for step in steps:
            saver.save(step, pieces_of(tensors(step)), ready=(True, True))
            saver.wait()


def reader_of(*folders: Path, step: int | None = None) -> CheckpointReader:
    """A reader of the checkpoint of a step; default: of the newest complete one."""
    search = find_checkpoints([Place(folder) for folder in folders])
    checkpoint = search.newest() if step is None else search.of_step(step)
    return CheckpointReader(checkpoint, search.checkpoints)


def newest_step(*folders: Path) -> int:
    return reader_of(*folders).checkpoint.step


def assert_loads(reader: CheckpointReader, degree: int = 1, rank: int = 0, layers: str = "") -> int:
    """Load what a rank needs, and compare it with what was saved. Returns how many bytes the rank needs."""
    step = reader.checkpoint.step
    blank = {key: torch.full_like(value, float("nan")) for key, value in tensors(step).items()}
    wanted = pieces_of(blank, degree, rank, layers)
    reader.load(wanted)
    expected = pieces_of(tensors(step), degree, rank, layers)
    for found, right in zip(wanted, expected, strict=True):
        assert torch.equal(found.data, right.data), f"{found.key} {found.box}"
    return sum(piece.data.nbytes for piece in wanted)
