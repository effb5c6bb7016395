"""Time of a resized layer relative to the dense one: products over slices and over gathered columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossal_hetero.layers.product import ProductContext, parallel_product
from colossal_hetero.layers.unit_layout import LINEAR_LAYOUT, UnitPlace, UnitShare
from colossal_hetero.layers.workload import Lineage, kept_count

from ..part import Row
from ..timing import seconds_in_turns

__all__ = ["RATIOS", "LayerShape", "speed_rows"]

RATIOS = (0.25, 0.5, 0.75, 0.9)
"""γ: pruned shares of the columns or outputs."""

ALLOWANCE = 0.03
"""What a resized layer may take beyond its share of the products, as a share of the dense layer's time."""

CALLS, LAUNCH_SECONDS = 3, 1e-3
"""Calls in one measurement, and more time than launching the kernels of one takes."""


@dataclass(frozen=True)
class LayerShape:
    """A layer of one rank."""

    rows: int
    inputs: int
    outputs: int
    is_column: bool
    """Whether outputs are left out, as in the first layer of a block; else inputs, as in the second one."""

    @property
    def resized(self) -> int:
        """The size of the dimension of which a part is left out."""
        return self.outputs if self.is_column else self.inputs

    @property
    def flop(self) -> float:
        """Operations of the three products of the dense layer."""
        return 6.0 * self.rows * self.inputs * self.outputs


def speed_rows(shape: LayerShape, device: torch.device, rounds: int) -> list[Row]:
    """For each ratio and each way to leave columns out: the time relative to the dense layer, the aim, and a note."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    x, weight = draw(shape.rows, shape.inputs), draw(shape.outputs, shape.inputs) / shape.inputs**0.5
    dy = draw(shape.rows, shape.outputs)
    ways = []
    for ratio in RATIOS:
        kept = kept_count(shape.resized, ratio)
        ways.append(_Way("slices", ratio, kept, _slices(shape, x, weight, dy, kept)))
        if not shape.is_column:
            ways.append(_Way("gathered columns", ratio, kept, _gathered(x, weight, dy, kept, generator)))
    runs = {"dense": _product(x, weight, dy)} | {way.title: way.run for way in ways}
    seconds = seconds_in_turns(runs, device, rounds=rounds, calls=CALLS, head_start_seconds=CALLS * LAUNCH_SECONDS)
    dense = seconds["dense"]
    of_dense = f"dense {1e3 * dense:.3f} ms, {shape.flop / dense / 1e12:.0f} TFLOP/s"
    rows: list[Row] = []
    for way in ways:
        taken = seconds[way.title]
        speed = way.kept / shape.resized * shape.flop / taken
        aim = 1 - way.ratio + ALLOWANCE if way.name == "slices" else ""
        note = f"{1e3 * taken:.3f} ms, {speed / 1e12:.0f} TFLOP/s; {of_dense}"
        rows.append((way.title, taken / dense, aim, note))
    return rows


@dataclass(frozen=True)
class _Way:
    """A way to leave columns or outputs out."""

    name: str
    ratio: float
    kept: int
    """Columns or outputs that are computed."""
    run: Callable[[], object]

    @property
    def title(self) -> str:
        return f"{self.name}, γ = {self.ratio:g}"


def _product(x: Tensor, weight: Tensor, dy: Tensor, **how: Any) -> Callable[[], Sequence[Tensor]]:
    """Forward product, dX and dW, by the code that the package's layers run."""
    leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
    context = ProductContext(LINEAR_LAYOUT, **how)

    def run() -> Sequence[Tensor]:
        return torch.autograd.grad(parallel_product(*leaves, None, context), leaves, dy)

    return run


def _slices(shape: LayerShape, x: Tensor, weight: Tensor, dy: Tensor, kept: int) -> Callable[[], object]:
    """The first ``kept`` units only, where they are; gradients of the others are zero."""
    place = UnitPlace(0 if shape.is_column else 1, 1, shape.resized, 1)
    share = UnitShare([place], kept, lambda gradients: None)
    share.begin([weight], None, [])
    if shape.is_column:
        return _product(x, weight, dy[:, :kept].contiguous(), share=share)
    return _product(x[:, :kept].contiguous(), weight, dy, share=share)


def _gathered(x: Tensor, weight: Tensor, dy: Tensor, kept: int, generator: torch.Generator) -> Callable[[], object]:
    """Single columns, anywhere, are copied next to each other, and their gradients back."""
    columns = torch.randperm(x.shape[1], generator=generator, device=x.device)[:kept].sort().values
    return _product(x, weight, dy, lineage=Lineage(columns, "zero", {}))
