"""Carry a rank's pruning ratio into its layers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..layers.linear import HeteroLinear
from ..layers.workload import Workload
from .columns import ColumnSelector, make_selector
from .config import BalanceConfig
from .decide import layer_ratios

__all__ = ["Resizer"]


class Resizer:
    """Tells this rank's layers which share of their columns to prune, and keeps their column selectors."""

    def __init__(self, layers: Mapping[str, HeteroLinear], config: BalanceConfig, iterations_per_interval: int) -> None:
        self._layers = layers
        self._config = config
        self._interval = iterations_per_interval
        self._ratio = 0.0
        self._selectors: dict[str, ColumnSelector] = {}
        self._iterations = 0
        self._resized = 0.0
        self._costs = {name: layer.matrix.numel() for name, layer in layers.items()}

    @property
    def resized(self) -> float:
        """The share of the rank's products that its layers leave out, weighted by their cost."""
        return self._resized

    def prune(self, ratio: float) -> None:
        """From the next forward on leave out ``ratio`` of the work; 0 takes all workloads back."""
        self._ratio = ratio
        if ratio == 0.0:
            self._selectors = {}
            self._resized = 0.0
            for layer in self._layers.values():
                layer.assign(None)
            return
        if not self._selectors:
            # Counted from here, so that the first interval is a whole one.
            self._iterations = 0
            self._selectors = {
                name: make_selector(self._config.priority, layer.matrix, self._config.seed + number)
                for number, (name, layer) in enumerate(self._layers.items())
            }
        self._assign()

    def end_iteration(self) -> None:
        """Let layers choose columns anew; at the end of an interval update the priorities."""
        for layer in self._layers.values():
            layer.begin_iteration()
        if not self._selectors:
            return
        self._iterations += 1
        if self._iterations % self._interval == 0:
            for name, selector in self._selectors.items():
                selector.end_interval(self._layers[name].matrix)
            if self._config.priority == "priority-diff":
                self._assign()

    def _assign(self) -> None:
        names = list(self._layers)
        ratios = np.full(len(names), self._ratio)
        if self._config.priority == "priority-diff":
            threshold = self._interval * self._config.variation_threshold
            shares = [self._selectors[name].candidate_share(threshold) for name in names]
            ratios = layer_ratios(self._ratio, shares, list(self._costs.values()), self._config)
        left_out = 0.0
        for name, ratio in zip(names, ratios, strict=True):
            layer = self._layers[name]
            workload = Workload(prune=float(ratio), select=self._selectors[name], imputation=self._config.imputation)
            layer.assign(workload)
            columns = layer.contraction_columns
            left_out += self._costs[name] * (1.0 - workload.kept_count(columns) / columns)
        self._resized = left_out / sum(self._costs.values())
