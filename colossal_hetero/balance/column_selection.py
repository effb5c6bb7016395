"""Selectors of the columns that a resized layer keeps (SEMI, Sec. III-B, Algorithm 1), one per layer.

``L`` is the number of the layer's contraction columns. Every selector returns kept columns in ascending order. None of
them makes the host wait for the device, so they use neither boolean indices nor copies from the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .config import Priority

__all__ = ["ColumnSelector", "NormProduct", "RandomColumns", "WeightVariation", "make_selector"]

SAMPLED_ROWS = 128
"""The number of a matrix's rows from which its columns' norms are estimated."""


class ColumnSelector(ABC):
    """Chooses a layer's kept columns; see :data:`colossal_hetero.layers.workload.Selector`."""

    @abstractmethod
    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        """The kept columns, int64 ``[count]`` ascending, for ``x [M, L]`` and ``weight [N, L]``."""

    def end_interval(self, weight: Tensor) -> None:  # noqa: B027  (most rules have no history)
        """End an interval of the priority rules (an epoch), after which the weight is ``weight [N, L]``."""

    def candidate_share(self, threshold: float) -> Tensor:
        """The share of columns that ``priority-diff`` may prune, a float32 scalar on the device of the weight; 0 for
        rules without variations."""
        return torch.zeros(())


class RandomColumns(ColumnSelector):
    """ZERO-Rd: keeps randomly drawn columns, new ones in each iteration. They are drawn on ``device``, the weight's."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        drawn = torch.randperm(weight.shape[1], generator=self._generator, device=weight.device)[:count]
        return drawn.sort().values


class NormProduct(ColumnSelector):
    """Keeps the columns of the largest ``‖X[:, i]‖·‖W[:, i]‖`` in each iteration.

    This is the score of column-row sampling, which minimizes the expected error of a sampled matrix product (Drineas,
    Kannan and Mahoney 2006). Norms are taken over :data:`SAMPLED_ROWS` or a few more evenly spaced rows.
    """

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        # Squared norms have the same order as norms.
        score = _squared_norms(x) * _squared_norms(weight)
        return _largest(score, count)


class WeightVariation(ColumnSelector):
    """ZERO-Pri: keeps columns whose weights varied most in the last interval, ``δ_i = mean_r |w_ri^t − w_ri^{t−1}|``.

    A column that was pruned during an interval keeps its δ, because its imputed gradient says nothing about it; so it
    can be kept again later. Columns without a δ count as varying most, in random order; so the first interval prunes at
    random, and the second first prunes columns that were kept in the first. The selector holds a copy of the weight.
    """

    def __init__(self, weight: Tensor, seed: int) -> None:
        columns = weight.shape[1]
        self._before = weight.clone()
        self._variation = torch.full((columns,), torch.inf, device=weight.device)
        self._pruned = torch.zeros(columns, dtype=torch.bool, device=weight.device)
        generator = torch.Generator(weight.device).manual_seed(seed)
        self._tie_breaker = torch.randperm(columns, generator=generator, device=weight.device)

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        # Columns beyond those of ``weight`` are given to another rank; they are not pruned, and come last here.
        variation = self._variation.clone()
        variation[weight.shape[1] :] = -torch.inf
        order = self._tie_breaker[variation[self._tie_breaker].argsort(descending=True, stable=True)]
        kept = order[:count].sort().values
        left_out = torch.ones_like(self._pruned).index_fill_(0, kept, False)
        left_out[weight.shape[1] :] = False
        self._pruned |= left_out
        return kept

    def end_interval(self, weight: Tensor) -> None:
        variation = (weight - self._before).abs_().mean(dim=0, dtype=torch.float32)
        self._variation = torch.where(self._pruned, self._variation, variation)
        self._pruned.zero_()
        self._before.copy_(weight)

    def candidate_share(self, threshold: float) -> Tensor:
        return (self._variation < threshold).float().mean()


def _squared_norms(matrix: Tensor) -> Tensor:
    """Squared column norms of ``[rows, L]``, float32 ``[L]``, from a sample of its rows."""
    return matrix[:: max(1, matrix.shape[0] // SAMPLED_ROWS)].float().square().sum(0)


def _largest(score: Tensor, count: int) -> Tensor:
    return score.topk(count, sorted=False).indices.sort().values


def make_selector(rule: Priority, weight: Tensor, seed: int) -> ColumnSelector:
    """A selector by the named rule for a layer with ``weight [N, L]``."""
    if rule == "random":
        return RandomColumns(seed, weight.device)
    if rule == "norm-product":
        return NormProduct()
    assert rule in ("priority", "priority-diff")
    return WeightVariation(weight, seed)
