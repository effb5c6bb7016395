"""The parallel layers, made from whole weights, what each rank must compute, in float64, and distances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import colossal_hetero.layers as ours
from colossal_hetero.layers.linear import HeteroLinear

Results = Mapping[str, Tensor]
"""Outputs and gradients by name."""


def largest_distance(actual: Tensor, exact: Tensor) -> float:
    """The largest difference of an entry, relative to the largest entry of ``exact``, a float64 tensor."""
    return float(_difference(actual, exact).abs().max() / exact.abs().max())


def mean_distance(actual: Tensor, exact: Tensor) -> float:
    """The root mean square of the differences, relative to that of the entries of ``exact``, a float64 tensor."""
    return float(_difference(actual, exact).norm() / exact.norm())


def _difference(actual: Tensor, exact: Tensor) -> Tensor:
    assert actual.shape == exact.shape, f"{actual.shape} is compared with {exact.shape}"
    return actual.double() - exact


@dataclass
class Distances:
    """The largest distance by workload, and where it was found.

    Results in fp32 are measured by their largest distance, those in half precision by the ratio of their mean distance
    to that of a dense layer that computes in the same precision. A dense layer rounds once where the sum of two ranks'
    products, with a bias, is rounded four times; how these coincide in the entry that is farthest off is chance.
    """

    is_ratio: bool
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, workload: str, layer: str, actual: Results, exact: Results, of_dense: Mapping[str, float]) -> None:
        """Compare each of the ``exact`` results.

        Args:
            workload: what was computed.
            layer: by which layer.
            actual: what it computed.
            exact: the same in float64.
            of_dense: by name, the mean distance of the dense layer's results from its exact ones.
        """
        for name, value in exact.items():
            if self.is_ratio:
                off = mean_distance(actual[name], value) / of_dense[name]
            else:
                off = largest_distance(actual[name], value)
            self._note(workload, off, f"{layer}, {name}")

    def merge(self, other: Distances) -> None:
        """Take in what another rank has found."""
        for workload, (off, where) in other.worst.items():
            self._note(workload, off, where)

    def _note(self, workload: str, off: float, where: str) -> None:
        before = self.worst.get(workload, (-1.0, ""))[0]
        # What is not a number is worse than any number.
        if math.isnan(off) or off > before:
            self.worst[workload] = (off, where)

    @staticmethod
    def in_precision(dtype: torch.dtype) -> Distances:
        """No distances yet, of results in this precision."""
        return Distances(is_ratio=dtype != torch.float32)


@dataclass(frozen=True)
class Sizes:
    """Of a layer and its batch."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Kind:
    """A class of parallel layers."""

    layer: type
    is_column: bool
    """Whether outputs are divided over the ranks, and not inputs."""
    parts: int = 1
    """How many fused parts the divided dimension has."""
    is_conv1d: bool = False
    """Whether the weight is stored as GPT-2's ``Conv1D`` does, [inputs, outputs]."""

    @property
    def name(self) -> str:
        return self.layer.__name__.removeprefix("Hetero")

    def divided(self, sizes: Sizes) -> int:
        """The number of features that are divided over the ranks."""
        return sizes.outputs if self.is_column else sizes.inputs

    def options(self, sizes: Sizes) -> dict[str, Any]:
        """Arguments of ``from_native_module``."""
        if "LMHead" in self.name:
            return {"make_vocab_size_divisible_by": 1}
        if self.parts > 1:
            return {"split_sizes": [self.divided(sizes) // self.parts] * self.parts}
        return {}


KINDS = (
    Kind(ours.HeteroLinear1D_Col, True),
    Kind(ours.HeteroLinear1D_Row, False),
    Kind(ours.HeteroFusedLinear1D_Col, True, parts=3),
    Kind(ours.HeteroFusedLinear1D_Row, False, parts=2),
    Kind(ours.HeteroGPT2FusedLinearConv1D_Col, True, parts=3, is_conv1d=True),
    Kind(ours.HeteroGPT2FusedLinearConv1D_Row, False, is_conv1d=True),
    Kind(ours.HeteroVocabParallelLMHead1D, True),
)


def native_layer(weight: Tensor, bias: Tensor, is_conv1d: bool = False) -> nn.Module:
    """An ``nn.Linear``, or GPT-2's ``Conv1D``, with copies of ``weight`` [N, K] and ``bias`` [N]."""
    outputs, inputs = weight.shape
    module = Conv1D(outputs, inputs) if is_conv1d else nn.Linear(inputs, outputs)
    module.to(weight)
    with torch.no_grad():
        module.weight.copy_(weight.t() if is_conv1d else weight)
        module.bias.copy_(bias)
    return module


def own_features(features: int, parts: int, rank: int, ranks: int) -> Tensor:
    """The features, int64, of a dimension with fused ``parts`` that belong to ``rank``: its share of each part."""
    return torch.arange(features).view(parts, ranks, -1)[:, rank].flatten()


@dataclass(frozen=True)
class Batch:
    """Input and gradient of the output of a whole layer."""

    x: Tensor
    """``[M, K]``"""
    dy: Tensor
    """``[M, N]``"""


@dataclass(frozen=True)
class OfRank:
    """What one rank computes, in float64."""

    results: dict[str, Tensor]
    """``y``, ``dx``, ``dw`` (as ``[N, L]``) and ``db``, summed over the ranks where the layer does so."""
    local_dx: Tensor
    """``dx`` before the sum."""


class Problem:
    """A layer of some kind with whole weights, which are equal on all ranks."""

    def __init__(self, kind: Kind, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.kind, self.sizes = kind, sizes
        self._dtype, self._device = dtype, device
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(sizes.outputs, sizes.inputs, generator=generator) / sizes.inputs**0.5
        self.weight = weight.to(device, dtype)
        self.bias = torch.randn(sizes.outputs, generator=generator).to(device, dtype)
        self._own = [
            own_features(kind.divided(sizes), kind.parts, rank, dist.get_world_size()).to(device)
            for rank in range(dist.get_world_size())
        ]

    def batch(self, seed: int = 0) -> Batch:
        """The batch with this number."""
        generator = torch.Generator().manual_seed(100 + seed)
        x = torch.randn(self.sizes.rows, self.sizes.inputs, generator=generator)
        dy = torch.randn(self.sizes.rows, self.sizes.outputs, generator=generator)
        return Batch(x.to(self._device, self._dtype), dy.to(self._device, self._dtype))

    def layer(self) -> HeteroLinear:
        """This rank's parallel layer."""
        module = native_layer(self.weight, self.bias, self.kind.is_conv1d)
        convert = self.kind.layer.from_native_module  # type: ignore[attr-defined]
        return convert(module, process_group=dist.group.WORLD, **self.kind.options(self.sizes))

    @property
    def columns(self) -> int:
        """L: contraction columns of a rank's weight."""
        return self.sizes.inputs if self.kind.is_column else self.sizes.inputs // dist.get_world_size()

    def run(self, layer: Any, batch: Batch) -> dict[str, Tensor]:
        """What ``layer`` computes in a forward and a backward pass."""
        own = self._own[dist.get_rank()]
        x, dy = (batch.x, batch.dy[:, own]) if self.kind.is_column else (batch.x[:, own], batch.dy)
        x = x.unflatten(0, (2, -1)).clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.backward(dy.unflatten(0, (2, -1)))
        dw = layer.weight.grad
        return {
            "y": y.detach().flatten(0, 1),
            "dx": x.grad.flatten(0, 1),  # type: ignore[union-attr]
            "dw": dw.t() if self.kind.is_conv1d else dw,
            "db": layer.bias.grad,
        }

    def exact(
        self,
        batch: Batch,
        kept: Sequence[Tensor | None] | None = None,
        imputation: str = "zero",
        before: Sequence[OfRank] | None = None,
    ) -> list[OfRank]:
        """What each rank must compute.

        Args:
            batch: the whole batch.
            kept: of each rank, the columns that it does not prune; None: all.
            imputation: of the pruned columns' gradients.
            before: results of the iteration before, for imputation "same".
        """
        ranks, is_column = len(self._own), self.kind.is_column
        weight, bias, x, dy = (each.double() for each in (self.weight, self.bias, batch.x, batch.dy))
        found = []
        for rank, own in enumerate(self._own):
            w_r = weight[own] if is_column else weight[:, own]
            x_r, dy_r = (x, dy[:, own]) if is_column else (x[:, own], dy)
            columns = torch.arange(w_r.shape[1], device=w_r.device)
            if kept is not None and kept[rank] is not None:
                columns = kept[rank]
            dx, dw = dy_r @ w_r, dy_r.t() @ x_r
            old = None if before is None else before[rank]
            dx = _imputed(dx, columns, imputation, None if old is None else old.local_dx)
            dw = _imputed(dw, columns, imputation, None if old is None else old.results["dw"])
            y = x_r[:, columns] @ w_r[:, columns].t()
            found.append(OfRank({"y": y, "dx": dx, "dw": dw, "db": dy_r.sum(0)}, dx))
        for rank in range(ranks):
            results = found[rank].results
            if is_column:
                results["y"] = results["y"] + bias[self._own[rank]]
                results["dx"] = torch.stack([other.local_dx for other in found]).sum(0)
        if not is_column:
            total = torch.stack([other.results["y"] for other in found]).sum(0) + bias
            for each in found:
                each.results["y"] = total
        return found

    def distances_of_dense(self) -> dict[str, float]:
        """Mean distances of the results of a dense layer that is not sharded from exact ones, in this precision."""
        batch = self.batch()

        def run(dtype: torch.dtype) -> dict[str, Tensor]:
            x, weight, bias = (each.to(dtype).requires_grad_() for each in (batch.x.clone(), self.weight, self.bias))
            y = F.linear(x, weight, bias)
            gradients = torch.autograd.grad(y, (x, weight, bias), batch.dy.to(dtype))
            return dict(zip(("y", "dx", "dw", "db"), (y.detach(), *gradients), strict=True))

        rounded, exact = run(self._dtype), run(torch.float64)
        return {name: mean_distance(rounded[name], exact[name]) for name in exact}


def _imputed(gradient: Tensor, kept: Tensor, imputation: str, before: Tensor | None) -> Tensor:
    part = gradient[:, kept]
    full = torch.zeros_like(gradient)
    if imputation == "average":
        full += part.mean(1, keepdim=True)
    elif imputation == "same" and before is not None:
        full += before
    full[:, kept] = part
    return full
