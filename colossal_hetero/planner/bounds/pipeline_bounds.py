"""Lower bounds on the time of pipelines, from which the search knows what it need not try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..profile.layer_costs import LayerCosts
from ..slots.tp_groups import SlotKind

__all__ = ["PipelineBounds"]

# [Note: a lower bound on a pipeline's time]
# Let w[t, b] be the time of block b on kind t, f any weights of the blocks with Σ f = 1, and ρ[t] = min_b w[t, b] /
# f[b]. A stage of kind t that takes at most m does at most a share m / ρ[t] of the work, and holds at most cap[t, m]
# whole blocks. So for the longest stage m, Σ n[t]·m / ρ[t] ≥ 1 and Σ n[t]·cap[t, m] ≥ blocks. For each m, the sum of
# the stages' times is smallest if the fast kinds are filled first. This sum is piecewise linear in m, so the minimum of
# sum + (K − 1)·m is at the smallest possible m, or at an m for which the fastest kinds alone do all the work. The
# embedding and the head are in cap: the stage that holds the first or the last block holds fewer blocks if that block
# takes longer.


@dataclass(eq=False)
class PipelineBounds:
    """Lower bounds on the seconds of pipelines of these kinds, see [Note: a lower bound on a pipeline's time]."""

    kinds: Sequence[SlotKind]
    hop_seconds: float = 0.0
    """The shortest possible transfer between stages, one way."""
    _work: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        seconds = np.maximum(np.array([kind.block_seconds for kind in self.kinds]), 1e-15)
        self.blocks = seconds.shape[1]
        shares = (seconds / seconds.sum(axis=1, keepdims=True)).mean(axis=0)
        self._work = (seconds / shares).min(axis=1)
        self._fastest_first = np.argsort(self._work, kind="stable")
        self._update = min(float(kind.costs.update_seconds.sum()) for kind in self.kinds)
        ends = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)
        windows = [_min_sums(row) for row in ends]
        heads, tails = ends[:, 1:], np.cumsum(seconds[:, ::-1], axis=1)
        self._levels = np.unique(np.concatenate([np.ravel(windows), np.ravel(heads), np.ravel(tails)]))
        grid = self._levels * (1 + 1e-12)
        self._capacity, self._head, self._tail = (
            np.stack([np.searchsorted(row, grid, side="right") for row in table], axis=1)
            for table in (windows, heads, tails)
        )
        self._memory = np.array([self._blocks_in_memory(kind) for kind in self.kinds])
        self._whole = np.array([self._holds_the_model(kind) for kind in self.kinds])

    def _blocks_in_memory(self, kind: SlotKind) -> NDArray[np.int64]:
        """How many blocks fit at most into the last n stages together, ``[1 + blocks]`` for n = 0, 1, …

        The last stage keeps the activations of one micro-batch, the stage before it of two, and so on.
        """
        held = self._held(kind.costs, kind.memory_bytes)
        if (recomputed := kind.recomputed_in_pipeline(2)) is not None:
            held = np.maximum(held, self._held(*recomputed))
        return np.concatenate([[0], np.cumsum(held)])

    def _held(self, costs: LayerCosts, memory_bytes: float) -> NDArray[np.int64]:
        """How many blocks a stage holds at most with 1, 2, … micro-batches in flight, ``[blocks]``."""
        state = np.concatenate([[0.0], np.cumsum(costs.state_bytes)])
        activation = np.concatenate([[0.0], np.cumsum(costs.activation_bytes)])
        needed = _min_sums(state) + np.arange(1, self.blocks + 1)[:, None] * _min_sums(activation)
        return np.asarray((needed <= memory_bytes).sum(axis=1))

    @staticmethod
    def _holds_the_model(kind: SlotKind) -> bool:
        """Whether a pipeline of one stage fits."""
        forms = [(kind.costs, kind.memory_in_pipeline(1)), kind.recomputed_in_pipeline(1)]
        return any(
            bool(costs.cumulative.state_bytes[-1] + costs.cumulative.activation_bytes[-1] <= memory)
            for costs, memory in (form for form in forms if form is not None)
        )

    @property
    def work_seconds(self) -> NDArray[np.float64]:
        """By kind: a slot needs at least ``s`` times this for a share ``s`` of the model's work."""
        return self._work

    @property
    def blocks_per_stage(self) -> NDArray[np.int64]:
        """By kind: how many blocks a stage holds at most."""
        return self._memory[:, 1]

    @property
    def hold_the_model(self) -> NDArray[np.bool_]:
        """By kind: whether a pipeline of one stage fits."""
        return self._whole

    def fits(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which compositions may hold the model, ``[rows]``: ``counts [rows, kinds]``, ``micro_batches [rows]``.

        The n-th stage from the end keeps n micro-batches in flight. So among the stages of one kind, one keeps at least
        one micro-batch, another at least two, and so on.
        """
        short = np.minimum(counts, micro_batches[:, None])
        kind = np.arange(len(self.kinds))
        blocks = self._memory[kind, short]
        last = self._memory[kind, short] - self._memory[kind, np.maximum(short - 1, 0)]
        fits = (blocks + (counts - short) * last).sum(axis=1) >= self.blocks
        return np.asarray(fits & ((counts.sum(axis=1) > 1) | (counts[:, self._whole] > 0).any(axis=1)))

    def seconds(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.float64]:
        """The lower bound by row, ``[rows]``; infinite where the model does not fit.

        Args:
            counts: Slots by kind, ``[rows, kinds]``, at least one and at most as many as blocks in each row.
            micro_batches: Per pipeline and iteration (K), ``[rows]``.
        """
        bound = np.full(len(counts), np.inf)
        held = np.flatnonzero(self.fits(counts, micro_batches))
        if len(held):
            bound[held] = self._seconds(counts[held], micro_batches[held])
        return bound

    def _seconds(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.float64]:
        power = counts / self._work
        longest = np.maximum(1.0 / power.sum(axis=1), self._levels[self._min_level(counts)])
        order = self._fastest_first
        power = power[:, order]
        times, summed_power = self._work[order], np.cumsum(power, axis=1)
        best = np.full(len(counts), np.inf)
        with np.errstate(divide="ignore"):
            candidates = [longest, *(np.maximum(longest, 1.0 / summed_power[:, kind]) for kind in range(len(order)))]
        for stage_seconds in candidates:
            left, total = np.ones(len(counts)), np.zeros(len(counts))
            finite = np.isfinite(stage_seconds)
            stage_seconds = np.where(finite, stage_seconds, 1.0)
            for kind, seconds in enumerate(times):
                part = np.minimum(left, power[:, kind] * stage_seconds)
                total += part * seconds
                left -= part
            best = np.minimum(best, np.where(finite, total + (micro_batches - 1) * stage_seconds, np.inf))
        stages = counts.sum(axis=1)
        hops = (2 * (stages - 1) + (micro_batches - 1) * (stages > 1)) * self.hop_seconds
        return np.asarray(best * (1 - 1e-9) + hops + self._update / stages)

    def _min_level(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """By row, the index in ``_levels`` of the shortest longest stage with which the stages hold all blocks."""
        low, high = np.full(len(counts), -1), np.full(len(counts), len(self._levels) - 1)
        absent = np.where(counts > 0, 0, self.blocks)
        while (open_ := high - low > 1).any():
            middle = (low + high) // 2
            capacity = self._capacity[middle]
            total = (counts * capacity).sum(axis=1)
            tail = total - (capacity - self._tail[middle] + absent).min(axis=1)
            head = total - (capacity - self._head[middle] + absent).min(axis=1)
            enough = np.minimum(head, tail) >= self.blocks
            high = np.where(open_ & enough, middle, high)
            low = np.where(open_ & ~enough, middle, low)
        return high


def _min_sums(cumulative: NDArray[np.float64]) -> NDArray[np.float64]:
    """The smallest sum of 1, 2, … neighboring values, ``[blocks]``, from cumulative sums ``[blocks + 1]``."""
    blocks = len(cumulative) - 1
    start, size = np.arange(blocks)[:, None], np.arange(1, blocks + 1)
    stop = start + size
    sums = np.where(stop <= blocks, cumulative[np.minimum(stop, blocks)] - cumulative[start], np.inf)
    return np.asarray(sums.min(axis=0))
