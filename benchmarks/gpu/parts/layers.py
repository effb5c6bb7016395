"""The parallel layers on a GPU: their results against exact ones, and the time of resized layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..layers.columns import column_distances
from ..layers.parallel_layers import Distances, Sizes
from ..layers.speed import LayerShape, speed_rows
from ..layers.units import unit_distances
from ..part import Case, Machine, Part, Row
from ..ranks import run_ranks

__all__ = ["PART"]

ABOUT = """
*Parity.* Two ranks, which share the GPU if there is only one, run every kind of parallel layer idle and with every kind
of workload: pruned columns with each imputation, migrated columns, and pruned and migrated units of MLPs. Outputs and
all gradients are compared with those of the whole layer, computed in float64 from the same operands. In fp32 (TF32 off)
the largest difference is given as a share of the largest entry; the aim is 1e-5. In bf16 and fp16 the root mean square
of the differences is given as a multiple of what a dense layer of the same precision has; the aim is 2. (Even two idle
ranks have 1.6 in a row-parallel layer: two products, their sum and the bias are rounded, instead of one result.)

*Speed.* Forward product, dX and dW of one layer with 8192 rows in bf16, in turns with the dense layer; the median time
relative to that of the dense layer. The host launches ahead, so that its time does not count. γ is the pruned share.
*Slices* are what the package computes for units that are next to each other, with gradients of the weight at full size;
the aim is 1 − γ + 0.03. *Gathered columns* are what it computes for single columns anywhere.
"""

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32_LIMIT, HALF_LIMIT = 1e-5, 2.0
RANKS = 2

SHAPES = {"ViT-1B": (2048, 8192), "Llama-7B": (4096, 11008), "Llama-70B shard of 8": (8192, 3584)}
"""Hidden size and MLP width on one rank."""


def cases(machine: Machine) -> Sequence[Case]:
    sizes = Sizes(10, 24, 36) if machine.is_tiny else Sizes(512, 1536, 2304)
    found = [
        Case(f"parity {name}", partial(_parity, machine, dtype, sizes))
        for name, dtype in PRECISIONS.items()
        if not (machine.is_tiny and name == "fp16")
    ]
    for name, (hidden, width) in ({"tiny": (128, 256)} if machine.is_tiny else SHAPES).items():
        rows, rounds = (16, 1) if machine.is_tiny else (8192, 20)
        first = LayerShape(rows, hidden, width, is_column=True)
        second = LayerShape(rows, width, hidden, is_column=False)
        for shape in (first, second):
            title = f"speed {name}, {shape.inputs} → {shape.outputs}"
            found.append(Case(title, partial(speed_rows, shape, machine.device, rounds), memory_bytes=8 << 30))
    return found


def _parity(machine: Machine, dtype: torch.dtype, sizes: Sizes) -> list[Row]:
    is_fp32 = dtype == torch.float32
    limit, unit = (FP32_LIMIT, "of the largest entry") if is_fp32 else (HALF_LIMIT, "× the dense layer's")
    found, *others = run_ranks(machine, RANKS, _distances, dtype, sizes)
    for other in others:
        found.merge(other)
    return [(workload, off, limit, f"{unit}; {where}") for workload, (off, where) in found.worst.items()]


def _distances(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Distances:
    """Of all workloads, on this rank."""
    found = column_distances(device, dtype, sizes)
    found.merge(unit_distances(device, dtype, sizes))
    return found


PART = Part("layers", ABOUT, ("case", "what", "measured", "aim ≤", "note"), cases)
