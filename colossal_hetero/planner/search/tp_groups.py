"""Tensor-parallel groups by kind of device, and how many of each kind a pipeline can have.

A *slot* is a tensor-parallel group of devices of one kind in one node; it can run one stage of a pipeline. A
*composition* says how many slots of each kind a pipeline has, ``[kinds]``. Slots of a kind are interchangeable here;
:mod:`.placement` decides later which of them, in which node, are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile

__all__ = ["SlotKind", "compositions", "cut_points", "divisors", "slot_kinds", "tensor_parallel_degrees"]

MAX_COMPOSITIONS = 200_000
"""If there are more, some counts of a kind are left out: see :func:`compositions`."""


@dataclass(frozen=True, eq=False)
class SlotKind:
    """Slots that differ only in the node they are in."""

    device: str
    """Kind of the devices."""
    speed: float
    """Speed of the slowest device in a slot, as a share of the speed at which its kind was profiled."""
    memory_bytes: float
    """Memory of one device."""
    costs: LayerCosts
    slots: tuple[tuple[int, ...], ...]
    """Ranks of each tensor-parallel group, as launched."""

    @property
    def block_seconds(self) -> NDArray[np.float64]:
        """Seconds of forward and backward per block, ``[blocks]``."""
        return self.costs.forward_seconds + self.costs.backward_seconds

    @property
    def model_seconds(self) -> float:
        """Seconds of forward and backward of all blocks; the inverse is the slot's computing power."""
        return float(self.block_seconds.sum())


def tensor_parallel_degrees(topology: Topology, profile: ModelProfile) -> list[int]:
    """Tensor-parallel degrees in the profile for which some node has enough devices of the profiled kind, ascending."""
    largest: dict[str, int] = {}
    for node in topology.nodes:
        for name in {topology.devices[rank].kind.name for rank in node.devices}:
            count = sum(topology.devices[rank].kind.name == name for rank in node.devices)
            largest[name] = max(largest.get(name, 0), count)
    return sorted({t.tensor_parallel for t in profile.times if t.tensor_parallel <= largest.get(t.device, 0)})


def tensor_parallel_groups(topology: Topology, degree: int) -> dict[tuple[str, float], list[tuple[int, ...]]]:
    """Groups of ``degree`` devices of one kind in one node, by kind and speed of the slowest member.

    Each node's devices are sorted by speed and grouped from the fastest on, so that devices of similar speed are
    together. Devices that do not fill a whole group are left out.
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
    """Slots by kind, the kind with the least computing power first.

    A kind is left out if its profiled micro-batches with this ``degree`` do not enclose ``micro_batch``.
    """
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


def compositions(available: Sequence[int], max_stages: int) -> NDArray[np.int64]:
    """Every composition of 1 to ``max_stages`` slots: ``[compositions, kinds]``.

    If there are more than :data:`MAX_COMPOSITIONS` (devices throttled to many different speeds), every second count
    between none and all is left out, first for the kind with the most counts, until few enough remain.
    """
    caps = [min(count, max_stages) for count in available]
    choices = [np.arange(cap + 1) for cap in caps]
    while True:
        rows = np.zeros((1, 0), dtype=np.int64)
        for choice in choices:
            rows = np.concatenate([np.repeat(rows, len(choice), axis=0), np.tile(choice, len(rows))[:, None]], axis=1)
            rows = rows[rows.sum(axis=1) <= max_stages]
            if len(rows) > MAX_COMPOSITIONS:
                break
        else:
            return np.asarray(rows[rows.sum(axis=1) >= 1])
        longest = max(range(len(choices)), key=lambda kind: len(choices[kind]))
        kept = choices[longest]
        choices[longest] = np.unique(np.concatenate([kept[::2], kept[-1:]]))


def divisors(number: int) -> list[int]:
    """The divisors of ``number``, ascending."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})


def cut_points(bounds: Sequence[Sequence[int]]) -> list[int]:
    """Block numbers at which at least one of several pipelines is cut, with both ends of the model; ascending."""
    return sorted(set(itertools.chain.from_iterable(bounds)))
