"""MLPs with pruned and migrated units, compared with exact results. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_hetero.layers as ours
from colossal_hetero.balance.divide import Move, divide
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.layers.block import Block
from colossal_hetero.layers.transport import Transport
from colossal_hetero.layers.unit_exchange import UnitExchange
from colossal_hetero.layers.unit_layout import UnitPlace

from .columns import PRUNED, migrating_plan
from .parallel_layers import Distances, Sizes, mean_distance, native_layer, own_features

__all__ = ["unit_distances"]


@dataclass(frozen=True)
class MlpKind:
    """The classes of an MLP's layers."""

    first: type
    second: type
    parts: int = 1
    """2: the first layer computes gate and value."""
    is_conv1d: bool = False

    @property
    def name(self) -> str:
        return f"MLP of {self.first.__name__.removeprefix('Hetero')}"


MLPS = (
    MlpKind(ours.HeteroLinear1D_Col, ours.HeteroLinear1D_Row),
    MlpKind(ours.HeteroFusedLinear1D_Col, ours.HeteroLinear1D_Row, parts=2),
    MlpKind(ours.HeteroGPT2FusedLinearConv1D_Col, ours.HeteroGPT2FusedLinearConv1D_Row, is_conv1d=True),
)


def unit_distances(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Distances:
    """How far all MLPs with pruned and migrated units are from exact results, on this rank. Collective over all ranks.

    ``sizes.outputs`` is the number of hidden units.
    """
    torch.set_float32_matmul_precision("highest")
    transport = Transport(dist.group.WORLD)  # type: ignore[arg-type]
    transport.connect(device)
    found = Distances.in_precision(dtype)
    pruning = BalancePlan.resizing([PRUNED] * dist.get_world_size())
    plans = {"pruned": pruning, "migrated": migrating_plan(), "pruned and migrated": migrating_plan(PRUNED)}
    for kind in MLPS:
        mlp = _Mlp(kind, sizes, dtype, device)
        of_dense = mlp.distances_of_dense()
        for name, plan in plans.items():
            found.add(f"units {name}", kind.name, mlp.run(plan, transport), mlp.exact(plan), of_dense)
    return found


class _Mlp:
    """An MLP with whole weights, which are equal on all ranks, and a batch."""

    def __init__(self, kind: MlpKind, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._kind, self._hidden, self._dtype = kind, sizes.outputs, dtype
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(5)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        width, features = sizes.inputs, kind.parts * self._hidden
        self._w1, self._b1 = draw(features, width, scale=width**-0.5), draw(features)
        self._w2, self._b2 = draw(width, self._hidden, scale=self._hidden**-0.5), draw(width)
        self._x, self._dy = draw(sizes.rows, width), draw(sizes.rows, width)

    @property
    def _units(self) -> int:
        """Hidden units of each rank."""
        return self._hidden // self._ranks

    def _kept(self, plan: BalancePlan, rank: int) -> Tensor:
        """The units of ``rank`` that nobody prunes: some of the first ones, and those that it gives away."""
        division = divide(self._units, plan)
        remaining = self._units - division.given(rank)
        drawn = torch.randperm(remaining, generator=torch.Generator().manual_seed(rank))
        kept = drawn[: division.kept(rank)].sort().values
        return torch.cat([kept, torch.arange(remaining, self._units)])

    def run(self, plan: BalancePlan, transport: Transport) -> dict[str, Tensor]:
        """What this rank computes in a forward and a backward pass."""
        kind, units = self._kind, self._units
        split = {"split_sizes": [self._hidden] * kind.parts} if "Fused" in kind.first.__name__ else {}
        first: Any = _convert(kind.first, native_layer(self._w1, self._b1, kind.is_conv1d), **split)
        second: Any = _convert(kind.second, native_layer(self._w2, self._b2, kind.is_conv1d))
        places = [
            [UnitPlace(first.output_dim, kind.parts, units, 1), UnitPlace(0, kind.parts, units, 1)],
            [UnitPlace(1 - second.output_dim, 1, units, 1)],
        ]
        block = Block("mlp", [first], second, places, None, ())
        division = divide(units, plan)
        moves: Sequence[Move] = division.moves
        chosen = self._kept(plan, self._rank)[: division.kept(self._rank)].to(self._x.device)
        exchange = UnitExchange(transport)
        exchange.assign([block], [moves], [division.kept(self._rank)], [lambda x, weight, count: chosen])
        exchange.begin_pass()
        x = self._x.clone().requires_grad_()
        y = second(_activate(first(x), kind.parts))
        y.backward(self._dy)
        exchange.end_iteration()
        # Waits until what this rank has sent has arrived: a message that is dropped before that may get lost.
        exchange.release([block])
        gradients = [layer.weight.grad.t() if kind.is_conv1d else layer.weight.grad for layer in (first, second)]
        found = (y.detach(), x.grad, gradients[0], first.bias.grad, gradients[1], second.bias.grad)
        return dict(zip(_RESULTS, found, strict=True))

    def exact(self, plan: BalancePlan) -> dict[str, Tensor]:
        """What this rank must compute."""
        mask = torch.zeros(self._hidden, dtype=torch.float64)
        for rank in range(self._ranks):
            mask[rank * self._units + self._kept(plan, rank)] = 1.0
        y, dx, dw1, db1, dw2, db2 = self._dense(torch.float64, mask.to(self._x.device))
        rows = own_features(len(dw1), self._kind.parts, self._rank, self._ranks).to(dw1.device)
        columns = own_features(self._hidden, 1, self._rank, self._ranks).to(dw1.device)
        return dict(zip(_RESULTS, (y, dx, dw1[rows], db1[rows], dw2[:, columns], db2), strict=True))

    def _dense(self, dtype: torch.dtype, mask: Tensor) -> tuple[Tensor, ...]:
        operands = (self._x, self._w1, self._b1, self._w2, self._b2)
        leaves = [operand.to(dtype, copy=True).requires_grad_() for operand in operands]
        x, w1, b1, w2, b2 = leaves
        y = F.linear(_activate(F.linear(x, w1, b1), self._kind.parts) * mask, w2, b2)
        return (y.detach(), *torch.autograd.grad(y, leaves, self._dy.to(dtype)))

    def distances_of_dense(self) -> dict[str, float]:
        """Mean distances of the results of an MLP that is not sharded from exact ones, in this precision."""
        ones = torch.ones(self._hidden, device=self._x.device)
        rounded, exact = (self._dense(dtype, ones.to(dtype)) for dtype in (self._dtype, torch.float64))
        return {name: mean_distance(*pair) for name, *pair in zip(_RESULTS, rounded, exact, strict=True)}


_RESULTS = ("y", "dx", "dw1", "db1", "dw2", "db2")


def _convert(layer: Any, module: nn.Module, **options: Any) -> nn.Module:
    return layer.from_native_module(module, process_group=dist.group.WORLD, **options)


def _activate(hidden: Tensor, parts: int) -> Tensor:
    """GELU, or its product with a gate."""
    activation: Callable[[Tensor], Tensor] = F.gelu
    first, *gate = hidden.chunk(parts, -1)
    return activation(first) * gate[0] if gate else activation(first)
