"""Tensor-parallel groups by kind of device, and how many of each kind a pipeline can have.

A *slot* is a tensor-parallel group of devices of one kind in one node; it can run one stage of a pipeline. A
*composition* says how many slots of each kind a pipeline has, ``[kinds]``; :mod:`.placement` decides later which.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..profile.layer_costs import LayerCosts
from ..profile.layer_profile import ModelProfile

MAX_COMPOSITIONS = 200_000  # compositions up to which none is left out, see :func:`compositions`
MIN_CHOICES = 5  # the smallest number of counts that is left of a kind or of similar kinds


@dataclass(frozen=True, eq=False)
class SlotKind:
    """Slots that differ only in the node they are in."""

    device: str
    speed: float  # speed of the slowest device in a slot, as a share of the speed at which its kind was profiled
    usable_bytes: float
    costs: LayerCosts
    slots: tuple[tuple[int, ...], ...]
    recomputed: LayerCosts | None = None  # costs of a stage that recomputes; None: none may
    training_speed: float | None = None

    @cached_property
    def memory_bytes(self) -> float:
        """:meth:`memory_in_pipeline` of several stages."""
        return self.memory_in_pipeline(2)

    def memory_in_pipeline(self, stages: int) -> float:
        """Memory that one device has for the state and the activations of its blocks."""
        return self.costs.memory_for_blocks(self.usable_bytes, stages)

    def recomputed_in_pipeline(self, stages: int) -> tuple[LayerCosts, float] | None:
        """Costs and memory of a stage that recomputes, as :meth:`memory_in_pipeline`; None if none may."""
        if self.recomputed is None:
            return None
        return self.recomputed, self.recomputed.memory_for_blocks(self.usable_bytes, stages)

    @cached_property
    def models_in_memory(self) -> float:
        """Number of models that a slot's memory holds, with their state and one micro-batch's activations."""
        forms = ((self.costs, self.memory_bytes), self.recomputed_in_pipeline(2))
        return max(
            memory / max(float(costs.state_bytes.sum() + costs.activation_bytes.sum()), 1e-300)
            for costs, memory in filter(None, forms)
        )

    @cached_property
    def block_seconds(self) -> NDArray[np.float64]:
        """Seconds of forward and backward per block, ``[blocks]``."""
        return self.costs.forward_seconds + self.costs.backward_seconds

    @cached_property
    def model_seconds(self) -> float:
        """Seconds of forward and backward of all blocks; the inverse is the slot's computing power."""
        return float(self.block_seconds.sum())


GroupForm = tuple[str, float, float | None]
"""Device, speed of the slowest member, and training speed."""


def tensor_parallel_degrees(topology: Topology, profile: ModelProfile) -> list[int]:
    """Tensor-parallel degrees in the profile for which some node has enough devices of the profiled kind, ascending."""
    largest: dict[str, int] = {}
    for node in topology.nodes:
        for name in {topology.devices[rank].kind.name for rank in node.devices}:
            count = sum(topology.devices[rank].kind.name == name for rank in node.devices)
            largest[name] = max(largest.get(name, 0), count)
    return sorted({t.tensor_parallel for t in profile.times if t.tensor_parallel <= largest.get(t.device, 0)})


@lru_cache(maxsize=16)
def tensor_parallel_groups(topology: Topology, degree: int) -> Mapping[GroupForm, tuple[tuple[int, ...], ...]]:
    """Groups of ``degree`` devices of one kind in one node. Devices of similar speed are together; those that do not
    fill a whole group are left out."""
    groups: dict[GroupForm, list[tuple[int, ...]]] = {}
    for node in topology.nodes:
        by_kind: dict[str, list[int]] = {}
        for rank in node.devices:
            by_kind.setdefault(topology.devices[rank].kind.name, []).append(rank)
        for name, ranks in sorted(by_kind.items()):
            ranks = sorted(ranks, key=lambda rank: (-topology.devices[rank].speed, rank))
            for start in range(0, len(ranks) - degree + 1, degree):
                group = tuple(ranks[start : start + degree])
                speed = min(topology.devices[rank].speed for rank in group)
                form = name, speed, topology.devices[group[0]].training_speed
                groups.setdefault(form, []).append(tuple(sorted(group)))
    return {form: tuple(each) for form, each in groups.items()}


def slot_kinds(
    topology: Topology,
    profile: ModelProfile,
    degree: int,
    micro_batch: int,
    *,
    recompute: bool = False,
    pipelines: int | None = None,
) -> list[SlotKind]:
    """Slots by kind, the least computing power first, without the kinds of which so many samples were not measured with
    this degree."""
    kinds = []
    for (name, speed, training_speed), slots in tensor_parallel_groups(topology, degree).items():
        if degree not in profile.tensor_parallel_degrees(name):
            continue
        measured = profile.micro_batches(name, degree)
        if measured[0] <= micro_batch <= measured[-1]:
            costs = partial(profile.costs, name, degree, micro_batch, speed, zero_shards=pipelines or 1)
            recomputed = costs(recompute=True) if recompute else None
            usable = topology.devices[slots[0][0]].kind.usable_bytes
            kinds.append(SlotKind(name, speed, usable, costs(), slots, recomputed, training_speed))
    return sorted(kinds, key=lambda kind: (-kind.model_seconds, kind.device, kind.speed, kind.training_speed or 0))


def compositions(seconds: Sequence[float], available: Sequence[int], max_stages: int) -> NDArray[np.int64]:
    """Compositions of 1 to ``max_stages`` slots, ``[compositions, kinds]``: all of them if they are few enough.

    If there are more than :data:`MAX_COMPOSITIONS`, every second of the larger counts is left out, first for the kind
    with the most counts, down to about :data:`MIN_CHOICES`. If that is not enough (devices that are throttled to many
    different speeds), the kinds with the most similar speeds count as one, of which a pipeline has the fastest slots.
    """
    groups = [range(kind, kind + 1) for kind in range(len(seconds))]
    logarithms = np.log(np.maximum(seconds, 1e-300))

    def counts_of(group: range) -> NDArray[np.int64]:
        return np.arange(min(sum(available[kind] for kind in group), max_stages) + 1)

    choices = list(map(counts_of, groups))
    while number_of_compositions(choices, max_stages) > MAX_COMPOSITIONS:
        longest = max(range(len(choices)), key=lambda group: len(choices[group]))
        kept, half = choices[longest], len(choices[longest]) // 2
        if len(kept) > MIN_CHOICES:
            choices[longest] = np.unique(np.concatenate([kept[:half], kept[half::2], kept[-1:]]))
        else:
            similar = [logarithms[one[0]] - logarithms[other[-1]] for one, other in pairwise(groups)]
            first = int(np.argmin(similar))
            groups[first : first + 2] = [range(groups[first].start, groups[first + 1].stop)]
            choices = list(map(counts_of, groups))
    rows = np.zeros((1, 0), dtype=np.int64)
    for choice in choices:
        rows = np.concatenate([np.repeat(rows, len(choice), axis=0), np.tile(choice, len(rows))[:, None]], axis=1)
        rows = rows[rows.sum(axis=1) <= max_stages]
    rows = rows[rows.sum(axis=1) >= 1]
    if len(groups) == len(available):
        return np.asarray(rows)
    counts = np.zeros((len(available), len(rows)), dtype=np.int64)
    for left, group in zip(rows.T.copy(), groups, strict=True):
        for kind in reversed(group):
            counts[kind] = np.minimum(left, available[kind])
            left -= counts[kind]
    return np.asarray(counts.T)


def number_of_compositions(choices: Sequence[NDArray[np.int64]], max_stages: int) -> float:
    """Number of ways to choose a count of each group so that they are at most ``max_stages`` together."""
    ways = np.zeros(max_stages + 1)
    ways[0] = 1.0
    for choice in choices:
        more = np.zeros(max_stages + 1)
        for count in choice.tolist():
            more[count:] += ways[: max_stages + 1 - count]
        ways = more
        if ways.sum() > MAX_COMPOSITIONS:
            break
    return float(ways.sum())


def divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
