"""Pruning of a rank: how much of each layer or block, and which of its columns or units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..layers.block import Block
from ..layers.linear import HeteroLinear
from .config import Priority, Pruning
from .ratios import layer_ratios

# Selectors of the contraction columns that a resized layer keeps (SEMI, Sec. III-B, Algorithm 1), in ascending order.
# None makes the host wait for the device, so they use neither boolean indices nor copies from the host.

SAMPLED_ROWS = 128  # number of a matrix's rows from which its columns' norms are estimated


class ColumnSelector:
    """Chooses a layer's kept columns (:data:`.Selector`): those of the largest ``‖X[:, i]‖·‖W[:, i]‖``, the score of
    column-row sampling, which minimizes the expected error of a sampled matrix product (Drineas, Kannan and Mahoney
    2006). Other rules are subclasses."""

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        """The kept columns, int64 ``[count]`` ascending, for ``x [M, L]`` and ``weight [N, L]``."""
        # Squared norms have the same order as norms.
        score = _squared_norms(x) * _squared_norms(weight)
        return score.topk(count, sorted=False).indices.sort().values

    def end_interval(self, weight: Tensor) -> None:
        """End an interval of the priority rules (an epoch), after which the weight is ``weight [N, L]``."""

    def candidate_share(self, threshold: float) -> Tensor:
        """Share of columns that ``priority-diff`` may prune, a float32 scalar on the weight's device; 0 by default."""
        return torch.zeros(())


class RandomColumns(ColumnSelector):
    """ZERO-Rd: keeps randomly drawn columns, new ones in each iteration. They are drawn on ``device``, the weight's."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        drawn = torch.randperm(weight.shape[1], generator=self._generator, device=weight.device)[:count]
        return drawn.sort().values


class WeightVariation(ColumnSelector):
    """ZERO-Pri: keeps columns whose weights varied most in the last interval, ``δ_i = mean_r |w_ri^t − w_ri^{t−1}|``. A
    column that was pruned in it keeps its δ. Columns without a δ count as varying most, in random order."""

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


def make_selector(rule: Priority, weight: Tensor, seed: int) -> ColumnSelector:
    if rule == "random":
        return RandomColumns(seed, weight.device)
    if rule == "norm-product":
        return ColumnSelector()
    assert rule in ("priority", "priority-diff")
    return WeightVariation(weight, seed)


# Targets -------------------------------------------------------------------------------------------------------------


Target = HeteroLinear | Block
"""What is pruned: a layer by its contraction columns, or a block by its units."""


def cost_of(target: Target) -> int:
    """The work of its products, in any unit."""
    if isinstance(target, Block):
        return target.elements_per_unit * target.units
    return target.matrix.numel()


class Pruner:
    def __init__(
        self, targets: Sequence[Target], rules: Pruning, max_resize: float, iterations_per_interval: int
    ) -> None:
        self._targets = targets
        self._rules, self._max_resize = rules, max_resize
        self._interval = iterations_per_interval
        self._ratio = 0.0
        self._iterations = 0
        self._candidates = [0.0] * len(targets)
        self._new_candidates: Tensor | None = None
        """The same after the last interval, until the next iteration ends: by then the device has computed them."""
        self.selectors: list[ColumnSelector] = []  # one selector for each target, or none before they are needed

    def start(self, ratio: float) -> None:
        """Prune ``ratio`` of the work from now on."""
        self._ratio = ratio
        if ratio > 0.0:
            self._select()

    def _select(self) -> None:
        if not self.selectors:
            self.selectors = [
                make_selector(self._rules.priority, target.matrix, self._rules.seed + number)
                for number, target in enumerate(self._targets)
            ]

    def ratios(self) -> np.ndarray:
        """γ of every target, float64 ``[targets]``."""
        if self._ratio == 0.0 or self._rules.priority != "priority-diff":
            return np.full(len(self._targets), self._ratio)
        costs = [cost_of(target) for target in self._targets]
        return layer_ratios(self._ratio, self._candidates, costs, self._rules, self._max_resize)

    def end_iteration(self) -> bool:
        """Count an iteration. Returns whether ratios may have changed, one iteration after the end of an interval of
        priorities. Weight variations are collected also where nothing is pruned (docs/algorithms.md, 1.3)."""
        if self._rules.priority in ("priority", "priority-diff"):
            self._select()
        if not self.selectors:
            return False
        may_have_changed = self._new_candidates is not None and self._ratio > 0.0
        if self._new_candidates is not None:
            self._candidates, self._new_candidates = self._new_candidates.tolist(), None
        self._iterations += 1
        if self._iterations % self._interval == 0:
            for selector, target in zip(self.selectors, self._targets, strict=True):
                selector.end_interval(target.matrix)
            if self._rules.priority == "priority-diff":
                threshold = self._interval * self._rules.variation_threshold
                shares = [selector.candidate_share(threshold) for selector in self.selectors]
                self._new_candidates = torch.stack(shares)
        return may_have_changed
