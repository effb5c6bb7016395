"""All orders of a pipeline's slots, as a graph in which orders that cost the same share one path.

Two slots are *twins* if they share one ``LayerCosts`` object and have the same memory and the same channels, so that
exchanging them changes nothing. Twins form a *class*, usually the slots of one node. Classes that can be exchanged as a
whole, such as those of like nodes, form a *group*. A state is the number of used slots in each class; it does not
matter which class of a group has which number. Each path from the first depth to the last is an order. A node at depth
s says only which kind of slot stage s has, over which hop its input comes, and which slots are left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts
from .pipeline import Pipeline, SlotForm, Split, evaluate

__all__ = [
    "Depth",
    "Orders",
    "TooManyOrders",
    "all_orders",
    "by_speed",
    "exchanged",
    "like_kinds",
    "near_each_other",
    "one_order",
]


NO_HOP = 0
"""Number of the hop before the first stage and behind the last stage, which takes no time."""

_State = tuple[tuple[int, ...], ...]
"""For each group, the numbers of used slots of its classes, ascending."""
_Key = tuple[_State, int, int, int]
"""State before the stage, group of the stage's slot, number of used slots of this slot's class, and incoming hop."""


class TooManyOrders(Exception):
    """The graph of all orders would have more states than allowed."""


@dataclass(frozen=True, eq=False)
class Depth:
    """Nodes of a stage, their exits (one for each different outgoing hop), and edges to nodes of the next depth."""

    kinds: NDArray[np.int_]
    """Kind of slot of each node, ``[nodes]``."""
    hops_in: NDArray[np.int_]
    """Incoming hop of each node, ``[nodes]``."""
    left: NDArray[np.int_]
    """Number of slots of each kind that are left, including the node's slot, ``[nodes, kinds]``."""
    exits: NDArray[np.int_]
    """Node of each exit, ``[exits]``."""
    hops_out: NDArray[np.int_]
    """Outgoing hop of each exit, ``[exits]``."""
    edges: NDArray[np.int_]
    """Exit of each edge, ``[edges]``, ordered by the node that the edge leads to. Every node has at least one edge."""
    starts: NDArray[np.int_]
    """First edge to each node of the next depth, ``[nodes of the next depth]``."""
    members: tuple[tuple[int, int], ...]
    """Group, and used slots of the class, of each node, to find its slot. In the graph of one order: slot and 0."""


@dataclass(frozen=True, eq=False)
class Orders:
    """A graph of orders, with the kinds, hops and slots that its numbers stand for."""

    depths: tuple[Depth, ...]
    kinds: tuple[SlotForm, ...]
    hop_seconds: NDArray[np.float64]
    """Time of each hop for each place of the cut, ``[hops, blocks + 1]``. Hop 0 takes no time."""
    groups: tuple[tuple[tuple[int, ...], ...], ...] | None
    """``groups[group][class]`` holds slots. None in the graph of one given order."""
    hop_between: NDArray[np.int_]
    """Hop from slot to slot, ``[slots, slots]``; −1 on the diagonal."""

    def slots(self, path: Sequence[int]) -> tuple[int, ...]:
        """An order of slots for a path of nodes; of several orders that cost the same, one with low slot numbers."""
        if self.groups is None:
            return tuple(depth.members[node][0] for depth, node in zip(self.depths, path, strict=True))
        left = [[list(slots) for slots in group] for group in self.groups]
        order: list[int] = []
        for depth, node in zip(self.depths, path, strict=True):
            group, used = depth.members[node]
            for place, slots in enumerate(left[group]):
                matches = len(self.groups[group][place]) - len(slots) == used
                if matches and slots and (not order or self.hop_between[order[-1], slots[0]] == depth.hops_in[node]):
                    order.append(slots.pop(0))
                    break
            else:  # pragma: no cover
                raise AssertionError("no free slot matches a node of the path")
        return tuple(order)


def one_order(pipeline: Pipeline, order: Sequence[int]) -> Orders:
    kinds, kind_of = _kinds(pipeline)
    neighbors = set(itertools.pairwise(order))
    hop_seconds, hop_between = _hops(pipeline, neighbors)
    one = np.zeros(1, dtype=int)
    hops = [NO_HOP, *(int(hop_between[a, b]) for a, b in itertools.pairwise(order)), NO_HOP]
    depths = tuple(
        Depth(
            kinds=np.array([kind_of[slot]]),
            hops_in=np.array([hops[s]]),
            left=np.bincount([kind_of[later] for later in order[s:]], minlength=len(kinds))[None],
            exits=one,
            hops_out=np.array([hops[s + 1]]),
            edges=one,
            starts=one,
            members=((slot, 0),),
        )
        for s, slot in enumerate(order)
    )
    return Orders(depths, kinds, hop_seconds, None, hop_between)


def all_orders(pipeline: Pipeline, max_states: int) -> Orders:
    slots = range(len(pipeline.slots))
    kinds, kind_of = _kinds(pipeline)
    hop_seconds, hop_between = _hops(pipeline, ((a, b) for a in slots for b in slots if a != b))
    classes = [_flat(same) for same in _twins([(slot,) for slot in slots], kind_of, hop_between)]
    groups = tuple(tuple(same) for same in _twins(classes, kind_of, hop_between))
    shapes = tuple((kind_of[group[0][0]], len(group), len(group[0])) for group in groups)
    inside = tuple(int(hop_between[group[0][0], group[0][1]]) if len(group[0]) > 1 else NO_HOP for group in groups)
    across = tuple(
        tuple(
            int(hop_between[one[0][0], (other[0] if one is not other else other[-1])[0]])
            if one is not other or len(one) > 1
            else NO_HOP
            for other in groups
        )
        for one in groups
    )
    if math.prod(math.comb(classes + size, size) for _, classes, size in shapes) > max_states:
        raise TooManyOrders
    return Orders(_depths(shapes, inside, across), kinds, hop_seconds, groups, hop_between)


@lru_cache(maxsize=256)
def _depths(
    shapes: tuple[tuple[int, int, int], ...],
    inside: tuple[int, ...],
    across: tuple[tuple[int, ...], ...],
) -> tuple[Depth, ...]:
    stages = sum(classes * size for _, classes, size in shapes)
    all_slots = np.zeros(1 + max(kind for kind, _, _ in shapes), dtype=int)
    for kind, classes, size in shapes:
        all_slots[kind] += classes * size
    empty: _State = tuple((0,) * classes for _, classes, _ in shapes)
    keys: list[_Key] = [(empty, group, 0, NO_HOP) for group in range(len(shapes))]
    depths = []
    for depth in range(stages):
        exits: list[int] = []
        hops_out: list[int] = []
        targets: list[int] = []
        sources: list[int] = []
        following: dict[_Key, int] = {}
        for node, (state, group, used, _) in enumerate(keys):
            if depth == stages - 1:
                targets.append(0)
                sources.append(len(exits))
                exits.append(node)
                hops_out.append(NO_HOP)
                continue
            after = _used(state, group, used)
            exit_of_hop: dict[int, int] = {}
            for other, other_used, hop in _next(after, group, used + 1, shapes, inside, across):
                if hop not in exit_of_hop:
                    exit_of_hop[hop] = len(exits)
                    exits.append(node)
                    hops_out.append(hop)
                targets.append(following.setdefault((after, other, other_used, hop), len(following)))
                sources.append(exit_of_hop[hop])
        by_target = np.argsort(targets, kind="stable")
        depths.append(
            Depth(
                kinds=np.array([shapes[key[1]][0] for key in keys]),
                hops_in=np.array([key[3] for key in keys]),
                left=all_slots - _used_by_kind([key[0] for key in keys], shapes),
                exits=np.array(exits),
                hops_out=np.array(hops_out),
                edges=np.array(sources)[by_target],
                starts=np.searchsorted(np.array(targets)[by_target], np.arange(max(len(following), 1))),
                members=tuple((key[1], key[2]) for key in keys),
            )
        )
        keys = list(following)
    return tuple(depths)


def _used(state: _State, group: int, used: int) -> _State:
    """The state after one more slot of a class of ``group``, of which ``used`` slots are used in ``state``."""
    counts = list(state[group])
    counts[counts.index(used)] += 1
    return (*state[:group], tuple(sorted(counts)), *state[group + 1 :])


def _used_by_kind(states: Sequence[_State], shapes: tuple[tuple[int, int, int], ...]) -> NDArray[np.int_]:
    """Number of used slots of each kind, ``[states, kinds]``."""
    used = np.array([[sum(counts) for counts in state] for state in states])
    by_kind = np.zeros((len(states), 1 + max(kind for kind, _, _ in shapes)), dtype=int)
    for group, (kind, _, _) in enumerate(shapes):
        by_kind[:, kind] += used[:, group]
    return by_kind


def _next(
    state: _State,
    group: int,
    used: int,
    shapes: tuple[tuple[int, int, int], ...],
    inside: tuple[int, ...],
    across: tuple[tuple[int, ...], ...],
) -> Iterator[tuple[int, int, int]]:
    """Group, used slots of the class, and hop of each slot that can follow one of ``group`` with ``used`` slots."""
    for other, (_, _, size) in enumerate(shapes):
        for count in sorted(set(state[other])):
            if count == size:
                continue
            if other != group:
                yield other, count, across[group][other]
                continue
            if count == used:
                yield other, count, inside[other]
            if count != used or (state[other].count(count) > 1 and across[other][other] != inside[other]):
                yield other, count, across[other][other]


def _flat(nested: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(slot for slots in nested for slot in slots))


def _kinds(pipeline: Pipeline) -> tuple[tuple[SlotForm, ...], list[int]]:
    """The different kinds of slots, and the number of each slot's kind."""
    numbers: dict[SlotForm, int] = {}
    of_slot = [numbers.setdefault(slot.kind, len(numbers)) for slot in pipeline.slots]
    return tuple(numbers), of_slot


def _hops(pipeline: Pipeline, pairs: Iterable[tuple[int, int]]) -> tuple[NDArray[np.float64], NDArray[np.int_]]:
    """Time of each different hop at each cut, ``[hops, blocks + 1]``, where hop 0 takes none, and the hop from slot to
    slot, ``[slots, slots]``, −1 where no pair is given."""
    vectors = [np.zeros(pipeline.blocks + 1)]
    numbers: dict[bytes, int] = {}  # A hop that takes no time is another number than no hop.
    known: dict[tuple[LayerCosts, Channel], int] = {}
    between = np.full((len(pipeline.slots), len(pipeline.slots)), -1)
    for a, b in pairs:
        costs, channel = pipeline.slots[a].costs, pipeline.channels[a][b]
        key = (costs, channel)
        if key not in known:
            seconds = costs.hop_seconds(channel)
            known[key] = numbers.setdefault(seconds.tobytes(), len(vectors))
            if known[key] == len(vectors):
                vectors.append(seconds)
        between[a, b] = known[key]
    return np.array(vectors), between


def _twins(
    items: Sequence[tuple[int, ...]], kind_of: Sequence[int], between: NDArray[np.int_]
) -> list[list[tuple[int, ...]]]:
    """Items, grouped by twins. An item is a tuple of slots that are twins of each other."""
    found: dict[tuple[object, ...], list[list[tuple[int, ...]]]] = {}
    for item in items:
        row, column = between[item[0]], between[:, item[0]]
        key = (kind_of[item[0]], len(item), np.sort(row).tobytes(), np.sort(column).tobytes())
        for same in found.setdefault(key, []):
            if _interchangeable(same[0], item, between):
                same.append(item)
                break
        else:
            found[key].append([item])
    return sorted(same for several in found.values() for same in several)


def _interchangeable(one: tuple[int, ...], other: tuple[int, ...], between: NDArray[np.int_]) -> bool:
    """True if two items of the same kind and size have the same hops inside, to each other and to all other slots."""
    a, b = one[0], other[0]
    if between[a, b] != between[b, a]:
        return False
    if len(one) > 1 and between[one[0], one[1]] != between[other[0], other[1]]:
        return False
    rest = np.ones(len(between), dtype=bool)
    rest[[*one, *other]] = False
    return bool((between[a, rest] == between[b, rest]).all() and (between[rest, a] == between[rest, b]).all())


# Many orders ---------------------------------------------------------------------------------------------------------


PASSES = 4
"""Maximum number of passes over all pairs of slots in :func:`exchanged`."""


def like_kinds(pipeline: Pipeline) -> Pipeline:
    """The pipeline with the fastest channel of two kinds between all their slots, so that these are interchangeable."""
    kinds = [slot.kind for slot in pipeline.slots]
    fastest: dict[object, Channel] = {}
    pairs = [(a, b) for a in range(len(kinds)) for b in range(len(kinds)) if a != b]
    for a, b in pairs:
        channel, key = pipeline.channels[a][b], (kinds[a], kinds[b])
        if key not in fastest or channel.bytes_per_second > fastest[key].bytes_per_second:
            fastest[key] = channel
    rows = [
        tuple(fastest[kinds[a], kinds[b]] if a != b else channel for b, channel in enumerate(pipeline.channels[a]))
        for a in range(len(kinds))
    ]
    return replace(pipeline, channels=tuple(rows))


def near_each_other(pipeline: Pipeline, order: Sequence[int]) -> tuple[int, ...]:
    """An order of the kinds of ``order`` with short hops. Each stage gets the remaining slot of its kind that the stage
    before reaches fastest; of several such slots, and for the first stage, the one with the lowest number."""
    seconds = _typical_seconds(pipeline)
    kinds = [slot.kind for slot in pipeline.slots]
    left = list(range(len(kinds)))
    chosen: list[int] = []
    for slot in order:
        alike = [other for other in left if kinds[other] == kinds[slot]]
        best = min(alike, key=lambda other: (seconds[chosen[-1], other] if chosen else 0.0, other))
        left.remove(best)
        chosen.append(best)
    return tuple(chosen)


def by_speed(pipeline: Pipeline) -> Iterator[tuple[int, ...]]:
    """Three orders: as given, slowest slots first, and fastest slots first. Equally fast slots keep their order."""
    totals = [slot.costs.cumulative for slot in pipeline.slots]
    work = np.array([float(total.forward_seconds[-1] + total.backward_seconds[-1]) for total in totals])
    yield tuple(range(len(work)))
    yield tuple(int(slot) for slot in np.argsort(-work, kind="stable"))
    yield tuple(int(slot) for slot in np.argsort(work, kind="stable"))


def exchanged(pipeline: Pipeline, split: Split) -> Split:
    """The split with slots of one kind exchanged where that is faster, in at most ``PASSES`` passes over all pairs."""
    kinds = [slot.kind for slot in pipeline.slots]
    seconds = evaluate(pipeline, split).seconds
    for _ in range(PASSES):
        before = seconds
        for a, b in itertools.combinations(range(len(kinds)), 2):
            order = list(split.order)
            if kinds[order[a]] != kinds[order[b]]:
                continue
            order[a], order[b] = order[b], order[a]
            other = Split(tuple(order), split.bounds)
            if (found := evaluate(pipeline, other).seconds) < seconds:
                split, seconds = other, found
        if seconds >= before:
            break
    return split


def _typical_seconds(pipeline: Pipeline) -> dict[tuple[int, int], float]:
    """Time of a transfer of the largest output from slot to slot, in seconds."""
    return {
        (a, b): channel.seconds(float(pipeline.slots[a].costs.output_bytes.max()))
        for a, row in enumerate(pipeline.channels)
        for b, channel in enumerate(row)
        if a != b
    }
