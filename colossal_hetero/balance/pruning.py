"""How much of each layer or block a rank prunes, and which of its columns or units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..layers.block import Block
from ..layers.linear import HeteroLinear
from .column_selection import ColumnSelector, make_selector
from .config import BalanceConfig
from .decide.ratios import layer_ratios
from .late_numbers import LateNumbers

__all__ = ["Columns", "Prunable", "Pruning", "Units"]


class Prunable(Protocol):
    """A layer with its contraction columns, or a block with its units."""

    @property
    def columns(self) -> int: ...
    @property
    def cost(self) -> int:
        """The work of its products, in any unit."""

    @property
    def matrix(self) -> Tensor:
        """The weights, ``[N, L]`` with one column per contraction column (or unit)."""

    def set_kind(self, kind: int) -> None:
        """Tell the layers which kind they mark in the clock."""


@dataclass(frozen=True)
class Columns:
    """A layer with its contraction columns."""

    layer: HeteroLinear

    @property
    def columns(self) -> int:
        return self.layer.contraction_columns

    @property
    def cost(self) -> int:
        return self.layer.matrix.numel()

    @property
    def matrix(self) -> Tensor:
        return self.layer.matrix

    def set_kind(self, kind: int) -> None:
        self.layer.kind = kind


@dataclass(frozen=True)
class Units:
    """A block with its units."""

    block: Block

    @property
    def columns(self) -> int:
        return self.block.units

    @property
    def cost(self) -> int:
        return self.block.elements_per_unit * self.block.units

    @property
    def matrix(self) -> Tensor:
        return self.block.matrices[1]

    def set_kind(self, kind: int) -> None:
        self.block.kind = kind
        for layer in self.block.layers:
            layer.kind = kind


class Pruning:
    """How much of each layer or block a rank prunes, and the selectors that choose the columns."""

    def __init__(self, targets: Sequence[Prunable], config: BalanceConfig, iterations_per_interval: int) -> None:
        self._targets = targets
        self._config = config
        self._interval = iterations_per_interval
        self._ratio = 0.0
        self._iterations = 0
        self._candidates = [0.0] * len(targets)
        """Of each target, the share of columns that ``priority-diff`` may prune."""
        self._new_candidates: LateNumbers | None = None
        """The same after the last interval, until the next iteration ends."""
        self.selectors: list[ColumnSelector] = []
        """One selector for each target while the rank prunes, else none."""

    def start(self, ratio: float) -> None:
        """Prune ``ratio`` of the work from now on; 0 discards all priorities."""
        self._ratio = ratio
        if ratio == 0.0:
            self.selectors = []
        elif not self.selectors:
            # Counting starts here, so that the first interval has full length.
            self._iterations = 0
            self._candidates, self._new_candidates = [0.0] * len(self._targets), None
            self.selectors = [
                make_selector(self._config.priority, target.matrix, self._config.seed + number)
                for number, target in enumerate(self._targets)
            ]

    def ratios(self) -> np.ndarray:
        """γ of every target, float64 ``[targets]``."""
        if self._ratio == 0.0 or self._config.priority != "priority-diff":
            return np.full(len(self._targets), self._ratio)
        return layer_ratios(self._ratio, self._candidates, [target.cost for target in self._targets], self._config)

    def end_iteration(self) -> bool:
        """Count an iteration; returns whether ratios may have changed.

        They do so one iteration after the end of an interval of priorities. The host does not wait for the device to
        find the columns that varied little, but reads their numbers when another iteration has ended.
        """
        if not self.selectors:
            return False
        may_have_changed = self._new_candidates is not None
        if self._new_candidates is not None:
            self._candidates, self._new_candidates = self._new_candidates.read(), None
        self._iterations += 1
        if self._iterations % self._interval == 0:
            for selector, target in zip(self.selectors, self._targets, strict=True):
                selector.end_interval(target.matrix)
            if self._config.priority == "priority-diff":
                threshold = self._interval * self._config.variation_threshold
                shares = [selector.candidate_share(threshold) for selector in self.selectors]
                self._new_candidates = LateNumbers(torch.stack(shares))
        return may_have_changed
