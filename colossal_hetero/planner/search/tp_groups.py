"""What a 3D plan can be made of: tensor-parallel groups by kind, how many of each a pipeline gets, and bounds.

A *slot* is a tensor-parallel group of devices of one kind in one node; a *composition* says how many slots of each kind
a pipeline has, ``[kinds]``. Slots of a kind are interchangeable here: where they stand is decided later, in
:mod:`.placement`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile

__all__ = ["Bounds", "SlotKind", "compositions", "slot_kinds", "tensor_parallel_degrees"]

MAX_COMPOSITIONS = 200_000
"""Beyond this, counts of a kind are thinned out: see :func:`compositions`."""


@dataclass(frozen=True, eq=False)
class SlotKind:
    """Slots that are interchangeable but for the node in which they are."""

    device: str
    """Kind of its devices."""
    speed: float
    """Share of its kind's speed that the slowest device in it reaches."""
    memory_bytes: float
    """Per device."""
    costs: LayerCosts
    slots: tuple[tuple[int, ...], ...]
    """Ranks of each tensor-parallel group, as launched."""

    @property
    def block_seconds(self) -> NDArray[np.float64]:
        """Forward and backward of each block, ``[blocks]``."""
        return self.costs.forward_seconds + self.costs.backward_seconds

    @property
    def model_seconds(self) -> float:
        """Forward and backward of all blocks: its inverse is the slot's computing power."""
        return float(self.block_seconds.sum())


def tensor_parallel_degrees(topology: Topology, profile: ModelProfile) -> list[int]:
    """The degrees that were measured for a kind of which some node has at least as many devices."""
    most: dict[str, int] = {}
    for node in topology.nodes:
        for name in {topology.devices[rank].kind.name for rank in node.devices}:
            count = sum(topology.devices[rank].kind.name == name for rank in node.devices)
            most[name] = max(most.get(name, 0), count)
    return sorted({t.tensor_parallel for t in profile.times if t.tensor_parallel <= most.get(t.device, 0)})


def tensor_parallel_groups(topology: Topology, degree: int) -> dict[tuple[str, float], list[tuple[int, ...]]]:
    """Groups of ``degree`` devices of one kind in one node, by kind and speed.

    Devices of like speed are put together, the fast ones first; what does not make up a whole group is left over.
    """
    groups: dict[tuple[str, float], list[tuple[int, ...]]] = {}
    for node in topology.nodes:
        by_kind: dict[str, list[int]] = {}
        for rank in node.devices:
            by_kind.setdefault(topology.devices[rank].kind.name, []).append(rank)
        for name, ranks in sorted(by_kind.items()):
            ranks = sorted(ranks, key=lambda rank: (-topology.devices[rank].speed, rank))
            for start in range(0, len(ranks) - degree + 1, degree):
                group = tuple(ranks[start : start + degree])
                speed = min(topology.devices[rank].speed for rank in group)
                groups.setdefault((name, speed), []).append(tuple(sorted(group)))
    return groups


def slot_kinds(topology: Topology, profile: ModelProfile, degree: int, micro_batch: int) -> list[SlotKind]:
    """The slots there are, those with the least computing power first; kinds without times for this are left out."""
    memory = {device.kind.name: device.kind.memory_bytes for device in topology.devices}
    measured: dict[str, list[int]] = {}
    for times in profile.times:
        if times.tensor_parallel == degree:
            measured.setdefault(times.device, []).append(times.micro_batch)
    kinds = [
        SlotKind(name, speed, float(memory[name]), profile.costs(name, degree, micro_batch, speed), tuple(slots))
        for (name, speed), slots in tensor_parallel_groups(topology, degree).items()
        if min(measured.get(name, [micro_batch + 1])) <= micro_batch <= max(measured[name])
    ]
    return sorted(kinds, key=lambda kind: (-kind.model_seconds, kind.device, kind.speed))


def compositions(available: Sequence[int], most_stages: int) -> NDArray[np.int64]:
    """Every composition of 1 to ``most_stages`` slots: ``[compositions, kinds]``.

    With very many kinds (devices throttled to many speeds) only some counts of each are kept: all, none and a few
    between, such that what is left can be looked at.
    """
    caps = [min(count, most_stages) for count in available]
    choices = [np.arange(cap + 1) for cap in caps]
    while True:
        rows = np.zeros((1, 0), dtype=np.int64)
        for choice in choices:
            rows = np.concatenate([np.repeat(rows, len(choice), axis=0), np.tile(choice, len(rows))[:, None]], axis=1)
            rows = rows[rows.sum(axis=1) <= most_stages]
            if len(rows) > MAX_COMPOSITIONS:
                break
        else:
            return rows[rows.sum(axis=1) >= 1]
        longest = max(range(len(choices)), key=lambda kind: len(choices[kind]))
        kept = choices[longest]
        choices[longest] = np.unique(np.concatenate([kept[::2], kept[-1:]]))


# [Note: a lower bound on a pipeline's time]
# Let kind t take w[t, b] for block b, f any weights of the blocks with Σ f = 1, and ρ[t] = min_b w[t, b] / f[b]. A
# stage of kind t that takes at most m does at most m / ρ[t] of the work, and in whole blocks at most cap[t, m]. So the
# longest stage m is such that Σ n[t]·m / ρ[t] ≥ 1 and Σ n[t]·cap[t, m] ≥ blocks. For each m, Σ t is least where the
# fast kinds are filled first; it is piecewise linear in m, so the least of Σ t + (K − 1)·m lies at the least m or where
# the fastest kinds alone do all the work. What the embedding and the head add is in cap: one stage must hold the last
# block, and holds fewer if that one is longer.


@dataclass(eq=False)
class Bounds:
    """Lower bounds on the seconds of pipelines made of these kinds, see [Note: a lower bound on a pipeline's time]."""

    kinds: Sequence[SlotKind]
    hop_seconds: float = 0.0
    """Least time of one transfer between stages."""
    _work: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        seconds = np.maximum(np.array([kind.block_seconds for kind in self.kinds]), 1e-15)
        self.blocks = seconds.shape[1]
        shares = (seconds / seconds.sum(axis=1, keepdims=True)).mean(axis=0)
        self._work = (seconds / shares).min(axis=1)
        self._fastest_first = np.argsort(self._work, kind="stable")
        self._update = min(float(kind.costs.update_seconds.sum()) for kind in self.kinds)
        ends = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)
        windows = [_least_by_size(row) for row in ends]
        heads, tails = ends[:, 1:], np.cumsum(seconds[:, ::-1], axis=1)
        self._levels = np.unique(np.concatenate([np.ravel(windows), np.ravel(heads), np.ravel(tails)]))
        grid = self._levels * (1 + 1e-12)
        self._capacity, self._head, self._tail = (
            np.stack([np.searchsorted(row, grid, side="right") for row in table], axis=1)
            for table in (windows, heads, tails)
        )
        self._memory = np.array([self._blocks_in_memory(kind) for kind in self.kinds])

    def _blocks_in_memory(self, kind: SlotKind) -> NDArray[np.int64]:
        """How many blocks fit at most, with activations of 1, 2, … micro-batches in flight: ``[blocks]``."""
        state = np.concatenate([[0.0], np.cumsum(kind.costs.state_bytes)])
        activation = np.concatenate([[0.0], np.cumsum(kind.costs.activation_bytes)])
        least = _least_by_size(state) + np.arange(1, self.blocks + 1)[:, None] * _least_by_size(activation)
        return np.concatenate([[0], np.cumsum((least <= kind.memory_bytes).sum(axis=1))])

    @property
    def work_seconds(self) -> NDArray[np.float64]:
        """By kind: no slot does a share s of the model in less than s times this."""
        return self._work

    def fits(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which compositions may hold the model: ``counts [rows, kinds]``, ``micro_batches [rows]``.

        A stage that is the n-th from the end keeps n micro-batches in flight, so of a kind's stages one keeps at least
        one, another at least two, and so on.
        """
        short = np.minimum(counts, micro_batches[:, None])
        kind = np.arange(len(self.kinds))
        blocks = self._memory[kind, short]
        last = self._memory[kind, short] - self._memory[kind, np.maximum(short - 1, 0)]
        return (blocks + (counts - short) * last).sum(axis=1) >= self.blocks

    def seconds(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.float64]:
        """The bound by row, infinite where the model does not fit.

        Args:
            counts: Slots by kind, ``[rows, kinds]``, at least one and at most as many as blocks in each row.
            micro_batches: K, ``[rows]``.
        """
        bound = np.full(len(counts), np.inf)
        held = np.flatnonzero(self.fits(counts, micro_batches))
        if len(held):
            bound[held] = self._seconds(counts[held], micro_batches[held])
        return bound

    def _seconds(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.float64]:
        power = counts / self._work
        longest = np.maximum(1.0 / power.sum(axis=1), self._levels[self._least_level(counts)])
        order = self._fastest_first
        power = power[:, order]
        times, together = self._work[order], np.cumsum(power, axis=1)
        best = np.full(len(counts), np.inf)
        with np.errstate(divide="ignore"):
            turns = [longest, *(np.maximum(longest, 1.0 / together[:, kind]) for kind in range(len(order)))]
        for turn in turns:
            left, total = np.ones(len(counts)), np.zeros(len(counts))
            known = np.isfinite(turn)
            turn = np.where(known, turn, 1.0)
            for kind, seconds in enumerate(times):
                part = np.minimum(left, power[:, kind] * turn)
                total += part * seconds
                left -= part
            best = np.minimum(best, np.where(known, total + (micro_batches - 1) * turn, np.inf))
        stages = counts.sum(axis=1)
        hops = (2 * (stages - 1) + (micro_batches - 1) * (stages > 1)) * self.hop_seconds
        return best * (1 - 1e-9) + hops + self._update / stages

    def _least_level(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """By row, the least of the possible longest stages with which all blocks are held."""
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


def _least_by_size(cumulative: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least sum of 1, 2, … neighbors, ``[blocks]`` from cumulative sums ``[blocks + 1]``."""
    blocks = len(cumulative) - 1
    start, size = np.arange(blocks)[:, None], np.arange(1, blocks + 1)
    stop = start + size
    sums = np.where(stop <= blocks, cumulative[np.minimum(stop, blocks)] - cumulative[start], np.inf)
    return np.asarray(sums.min(axis=0))


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def boundaries(bounds: Sequence[Sequence[int]]) -> list[int]:
    """All places at which one of several pipelines is cut, ascending."""
    return sorted(set(itertools.chain.from_iterable(bounds)))
