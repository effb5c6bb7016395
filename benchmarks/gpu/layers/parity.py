"""How far results are from exact ones, in units that tell whether that is more than rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Distances", "largest_distance", "mean_distance"]

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
