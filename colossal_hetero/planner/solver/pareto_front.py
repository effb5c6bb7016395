"""Plans of which none is both faster and cheaper than another.

Each choice of numbers of nodes has a lower bound on the time and cost of an iteration. Plans are made for the choice
that promises most beside what was found, until no choice does or the time is over.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..cost.evaluate import HOUR, PlanCost, check_prices, plan_cost
from ..cost.placement import SlotPool
from ..cost.plan import Plan
from ..cost.ranked_plan import ROUNDING
from ..cost.runnable import NoPlanError
from ..profile.layer_profile import ModelProfile
from .gradient_bounds import slots_by_node
from .pipeline_bounds import PipelineBounds, RelaxedPool
from .problem import Problem
from .search import search

MAX_CHOICES = 20_000
"""Limit of choices; with more, some numbers of nodes are left out, first of the types with most nodes."""


@dataclass(frozen=True)
class NodeType:
    """Nodes that are alike, in one cluster, and have one price."""

    name: str
    nodes: tuple[int, ...]
    dollars_per_hour: float


def node_types(topology: Topology) -> list[NodeType]:
    numbers: dict[object, list[int]] = {}
    for number, node in enumerate(topology.nodes):
        devices = tuple((topology.devices[rank].kind, topology.devices[rank].speed) for rank in node.devices)
        same = (node.inside, node.nics, node.inside_bytes_per_second, node.dollars_per_hour)
        key = (node.cluster, devices, *same)
        numbers.setdefault(key, []).append(number)
    types = []
    for alike in numbers.values():
        first = topology.nodes[alike[0]]
        stem = first.name.rpartition("-")[0] if len(alike) > 1 else ""
        types.append(NodeType(stem or first.name, tuple(alike), first.dollars_per_hour or 0.0))
    return types


def choices(types: Sequence[NodeType]) -> NDArray[np.int64]:
    """Numbers of nodes of each type: all choices but none at all, ``[choices, types]``; see :data:`MAX_CHOICES`."""
    counts = [np.arange(len(each.nodes) + 1) for each in types]
    while np.prod([float(len(each)) for each in counts]) > MAX_CHOICES:
        longest = max(range(len(counts)), key=lambda number: len(counts[number]))
        if len(counts[longest]) <= 2:
            break
        counts[longest] = np.unique(np.concatenate([counts[longest][::2], counts[longest][-1:]]))
    rows = np.array(list(itertools.islice(itertools.product(*counts), 1, MAX_CHOICES + 1)), dtype=np.int64)
    return rows.reshape(-1, len(types))


def within(
    topology: Topology, types: Sequence[NodeType], counts: NDArray[np.int64], at_most: Mapping[str, int]
) -> NDArray[np.bool_]:
    """True for choices that keep to quotas: ``at_most`` of a type of nodes or a kind of device."""
    allowed = np.ones(len(counts), dtype=bool)
    devices = [[topology.devices[rank].kind.name for rank in topology.nodes[each.nodes[0]].devices] for each in types]
    known = {each.name: [int(each is other) for other in types] for each in types}
    known |= {kind: [each.count(kind) for each in devices] for kind in sorted(set(itertools.chain(*devices)))}
    for name, most in at_most.items():
        if name not in known:
            raise ValueError(
                f"at most {most} of {name}: there are no such nodes or devices; the cluster has {', '.join(known)}"
            )
        allowed &= counts @ np.array(known[name]) <= most
    if not allowed.any():
        words = ", ".join(f"{most} of {name}" for name, most in at_most.items())
        raise NoPlanError(f"at most {words}: no node is left; allow more")
    return allowed


def taken(topology: Topology, types: Sequence[NodeType], counts: Sequence[int]) -> tuple[Topology, tuple[int, ...]]:
    """Cluster with only so many nodes of each type, and the number of each of its devices in ``topology``."""
    chosen = sorted(number for each, count in zip(types, counts, strict=True) for number in each.nodes[:count])
    numbers = [rank for number in chosen for rank in topology.nodes[number].devices]
    return topology.of_devices(set(numbers)), tuple(numbers)


# [Note: a bound for all plans] Let ρ[t] be the time that a slot of kind t needs at least for a whole micro-batch (see
# [Note: a lower bound on a pipeline's time] in ``pipeline_bounds.py``): a share σ of the model's work takes at least
# σ·ρ[t]. Let P = Σ 1/ρ over all slots, and K the number of micro-batches of an iteration of T seconds.
# - Work over speed. A slot of a pipeline with K_p micro-batches takes at least K_p·σ·ρ ≤ T. Summed over its slots,
#   whose shares are 1 together, K_p ≤ T·P_p; summed over pipelines, T ≥ K / P.
# - Filling pipelines. The first micro-batch takes at least ρ_min, and each further one at least 1 / P_p. So with D
#   pipelines T ≥ ρ_min + (K − D) / P. A pipeline has as many stages as hold the model, so D is limited.
# - Memory. All slots together must hold all blocks.


def time_bounds(
    topology: Topology, pools: Sequence[SlotPool], types: Sequence[NodeType], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Lower bounds on the seconds of an iteration, ``[choices]``; infinite where the model does not fit."""
    return np.asarray(np.minimum.reduce([_of_pool(topology, pool, types, counts) for pool in pools]))


def _of_pool(
    topology: Topology, pool: SlotPool, types: Sequence[NodeType], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    slots = counts @ slots_by_node(topology, pool)[[each.nodes[0] for each in types]]
    bounds = PipelineBounds(pool)
    work, present, held = bounds.work_seconds, slots > 0, bounds.blocks_per_stage
    whole = np.asarray((present & bounds.hold_the_model).any(axis=1))  # a pipeline of one stage needs more memory
    fits = ((slots * held).sum(axis=1) >= bounds.blocks) & ((slots.sum(axis=1) > 1) | whole)
    slots, present, whole = slots[fits], present[fits], whole[fits]
    total, power = pool.total_micro_batches, (slots / work).sum(axis=1)
    first = np.where(present, work, np.inf).min(axis=1)
    stages = np.maximum(np.ceil(bounds.blocks / np.where(present, held, 0).max(axis=1)), np.where(whole, 1, 2))
    most = np.minimum(np.floor(slots.sum(axis=1) / stages), total)
    found = np.full(len(fits), np.inf)
    found[fits] = np.maximum(total / power, first + (total - most) / power) * (1 - 1e-9)
    return found


Objective = Literal["time", "cost"]

PER_CHOICE = 3  # plans that are kept for each choice of nodes; they may leave nodes out


@dataclass(frozen=True, eq=False)
class FrontPoint:
    """A plan than which no other that was found is both faster and cheaper."""

    plan: Plan  # ranks are those of the whole cluster
    cost: PlanCost
    nodes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return self.plan.iteration_seconds

    @property
    def dollars(self) -> float:
        return self.cost.dollars_per_iteration


def pareto_front(
    problem: Problem,
    *,
    at_most: Mapping[str, int] | None = None,
    time_limit_seconds: float = 5.0,
    tolerance: float = 0.01,
) -> list[FrontPoint]:
    """Plans that no other one is better than, the fastest first, of all choices of the nodes of the cluster."""
    topology = problem.topology
    check_prices(topology)
    if set(problem.schedules) != {"1f1b"} or problem.overlap:
        raise ValueError(
            "plans are compared by price for the schedule 1f1b without overlap only, because other plans may be faster "
            "than their lower bounds; leave these out"
        )
    begin = time.monotonic()
    types = node_types(topology)
    counts = choices(types)
    counts = counts[within(topology, types, counts, at_most or {})]
    relaxed = [RelaxedPool(problem, pool) for pool in problem.pools]
    seconds = time_bounds(topology, [each.of(each.most_pipelines) for each in relaxed], types, counts)
    possible = np.isfinite(seconds)
    counts, seconds = counts[possible], seconds[possible]
    rates = counts @ np.array([each.dollars_per_hour for each in types])
    found = _Search(counts, seconds, seconds * rates / HOUR)
    why = "no choice of nodes holds the model"
    while (row := found.most_promising(tolerance)) is not None:
        part, numbers = taken(topology, types, counts[row].tolist())
        try:
            plans = [each.plan for each in search(replace(problem, topology=part), keep=PER_CHOICE).plans]
        except ValueError as error:
            plans, why = [], str(error)
        points = [_point(topology, problem.profile, types, _renumbered(plan, numbers)) for plan in plans]
        found.add(row, points)
        if time.monotonic() - begin > time_limit_seconds and len(found.ratios) > 1:
            break
    if not found.points:
        raise NoPlanError(why)
    front: list[FrontPoint] = []
    for point in sorted(found.points, key=lambda each: (each.seconds, each.dollars)):
        if not front or point.dollars < front[-1].dollars * (1 - ROUNDING):
            front.append(point)
    return front


def choose(
    front: Sequence[FrontPoint],
    objective: Objective,
    *,
    max_seconds: float = math.inf,
    max_dollars: float = math.inf,
    iterations: float | None = None,
) -> FrontPoint:
    """The best point within limits of an iteration; ``iterations`` of a training are for the error's words only."""

    def words(seconds: float, dollars: float) -> str:
        time = f"{seconds:.4g} s" if iterations is None else f"{iterations * seconds / HOUR:,.4g} h"
        given = ((seconds, time), (dollars, f"${(iterations or 1) * dollars:,.4g}"))
        return " for ".join(text for value, text in given if math.isfinite(value))

    allowed = [
        point
        for point in front
        if point.seconds <= max_seconds * (1 + ROUNDING) and point.dollars <= max_dollars * (1 + ROUNDING)
    ]
    if not allowed:
        ends = " and ".join(words(point.seconds, point.dollars) for point in dict.fromkeys((front[0], front[-1])))
        limits = words(max_seconds, max_dollars)
        raise ValueError(f"no plan takes at most {limits}; the fastest and the cheapest take {ends}")
    return min(allowed, key=lambda point: point.seconds if objective == "time" else point.dollars)


class _Search:
    """Plans that were found, and the choice of nodes to try next; arrays of lower bounds are ``[choices]``."""

    def __init__(self, counts: NDArray[np.int64], seconds: NDArray[np.float64], dollars: NDArray[np.float64]) -> None:
        self._counts, self._seconds, self._dollars = counts, seconds, dollars
        self._left = np.ones(len(counts), dtype=bool)
        self.ratios: list[float] = []
        self.points: list[FrontPoint] = []

    def most_promising(self, tolerance: float) -> int | None:
        """Choice that should be ahead of all that was found by the largest share; None if there is none."""
        if not self._left.any():
            return None
        # Both ends are looked for first.
        if len(self.ratios) < 2:
            return int(np.argmin(np.where(self._left, self._dollars if self.ratios else self._seconds, np.inf)))
        # Plans do not reach the bounds; those that were made show by how much. The bounds alone have the last word.
        for ratio in (float(np.median(self.ratios)), 1.0):
            ahead = np.full(len(self._seconds), np.inf)
            for point in self.points:
                faster = point.seconds / (self._seconds * ratio)
                cheaper = point.dollars / (self._dollars * ratio + 1e-300)
                ahead = np.minimum(ahead, np.maximum(faster, cheaper))
            promising = self._left & (ahead > 1 + tolerance)
            if promising.any():
                # Many nodes take long to plan for.
                return int(np.argmax(np.where(promising, (ahead - 1) / self._counts.sum(axis=1), 0.0)))
        return None

    def add(self, row: int, points: Sequence[FrontPoint]) -> None:
        self._left[row] = False
        if points:
            self.ratios.append(points[0].seconds / float(self._seconds[row]))
            # Without nodes that the fastest plan leaves out it is the fastest, too.
            fewer = (self._counts <= self._counts[row]) & (self._counts >= np.array(points[0].nodes))
            self._left[fewer.all(axis=1)] = False
        self.points += points


def _point(topology: Topology, profile: ModelProfile, types: Sequence[NodeType], plan: Plan) -> FrontPoint:
    used = {topology.devices[rank].node for replica in plan.rank_order for group in replica for rank in group}
    nodes = tuple(len(used & set(each.nodes)) for each in types)
    return FrontPoint(plan, plan_cost(topology, profile, plan), nodes)


def _renumbered(plan: Plan, numbers: Sequence[int]) -> Plan:
    replicas = []
    for replica in plan.replicas:
        ranks = [tuple(numbers[rank] for rank in stage.ranks) for stage in replica.stages]
        stages = [stage.model_copy(update={"ranks": own}) for stage, own in zip(replica.stages, ranks, strict=True)]
        replicas.append(replica.model_copy(update={"stages": tuple(stages)}))
    return plan.model_copy(update={"replicas": tuple(replicas)})
