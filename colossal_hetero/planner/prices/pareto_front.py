"""The plans that are worth their price: none is both faster and cheaper than another.

Each choice of numbers of nodes has a lower bound on the time of an iteration, and so on its cost. The search makes
plans for the choice that promises most beside what was found, until no choice promises anything more, or time is over.
What no plan was made for still counts in the bounds, so each plan says how far from the best possible it can be.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..bounds.iteration_bound import IterationBound
from ..bounds.relaxed_pools import relaxed_pools
from ..cluster.topology import Topology
from ..plans.plan import Plan
from ..plans.runnable import NoPlanError
from ..profile.layer_profile import ModelProfile
from ..search.make_plans import make_plans
from ..search.settings import slots_to_try
from ..slots.search_space import SIMPLE, SearchSpace
from .node_choice import NodeType, choices, node_types, taken, within
from .plan_cost import HOUR, PlanCost, check_prices, plan_cost
from .time_bounds import time_bounds

__all__ = ["FrontPoint", "Objective", "choose", "limits_in_words", "pareto_front"]

Objective = Literal["time", "cost"]

PER_CHOICE = 3
"""Plans that are kept for each choice of nodes. They may leave nodes out."""

SEARCHED = 0.6
"""Part of the time in which plans are looked for."""
PROOF_SECONDS = 0.5
"""For a better lower bound on the time of one choice of nodes."""

ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class FrontPoint:
    """A plan than which no other that was found is both faster and cheaper."""

    plan: Plan
    """With ranks numbered as in the whole cluster."""
    cost: PlanCost
    nodes: tuple[int, ...]
    """How many nodes of each type it uses."""
    gap: float
    """No plan can be both faster and cheaper by more than this share (0.03: 3 %), by the lower bounds."""

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.plan.iteration_seconds

    @property
    def dollars(self) -> float:
        """Of an iteration."""
        return self.cost.dollars_per_iteration


def pareto_front(
    topology: Topology,
    profile: ModelProfile,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] | None = None,
    at_most: Mapping[str, int] | None = None,
    time_limit_seconds: float = 5.0,
    tolerance: float = 0.01,
    **options: Any,
) -> list[FrontPoint]:
    """Plans from the fastest to the cheapest.

    Args:
        topology: all nodes that can be had, with prices.
        profile: see :func:`.make_plans.make_plans`, as are the following arguments and ``options``. Only plans of the
            schedule ``1f1b`` in the simple search space, without ``overlap``, are compared by price.
        at_most: quotas, by the name of a type of nodes or by a kind of devices: how many of these nodes or devices.
        time_limit_seconds: no search for another choice of nodes begins after most of this, once both ends are known.
            The rest is for proofs of how good the plans are.
        tolerance: choices that promise less than this share in time and in cost are not searched.

    Raises:
        NoPlanError: there is no plan; the message says why.
        ValueError: a price is not known, or a quota or an option is not possible.
    """
    check_prices(topology)
    _check_bounds_are_known(**options)
    begin = time.monotonic()
    known, pools, *_ = slots_to_try(topology, profile, global_batch, micro_batches, tensor_parallel)
    types = node_types(known)
    counts = choices(types)
    counts = counts[within(known, types, counts, at_most or {})]
    seconds = time_bounds(known, pools, types, counts)
    possible = np.isfinite(seconds)
    counts, seconds = counts[possible], seconds[possible]
    options = dict(global_batch=global_batch, micro_batches=micro_batches, tensor_parallel=tensor_parallel, **options)
    rates = counts @ np.array([each.dollars_per_hour for each in types])
    search = _Search(counts, seconds, seconds * rates / HOUR)
    problem = "no choice of nodes holds the model"
    while (row := search.most_promising(tolerance)) is not None:
        part, numbers = taken(topology, types, counts[row].tolist())
        try:
            plans = [each.plan for each in make_plans(part, profile, keep=PER_CHOICE, **options)]
        except ValueError as error:
            plans, problem = [], str(error)
        points = [_point(topology, profile, types, _renumbered(plan, numbers)) for plan in plans]
        search.add(row, points)
        if time.monotonic() - begin > SEARCHED * time_limit_seconds and search.knows_both_ends:
            break
    if not search.points:
        raise NoPlanError(problem)
    while (left := begin + time_limit_seconds - time.monotonic()) > 0 and (loosest := search.loosest()) is not None:
        row, below = loosest
        part, _ = taken(topology, types, counts[row].tolist())
        known, pools, *_ = slots_to_try(part, profile, global_batch, micro_batches, tensor_parallel)
        bound = IterationBound(
            known, relaxed_pools(known, profile, pools, SIMPLE), runnable=options.get("runnable", True)
        )
        search.raise_bounds(row, bound.seconds(below, time_limit_seconds=min(left, PROOF_SECONDS)))
    return search.front()


def limits_in_words(seconds: float | None, dollars: float | None) -> str:
    """Seconds and dollars of an iteration, where they are given: ``1.38 s for $0.00287``."""
    price = "" if dollars is None else f"${dollars:.4g}"
    return " for ".join(each for each in ("" if seconds is None else f"{seconds:.4g} s", price) if each)


def choose(
    front: Sequence[FrontPoint],
    objective: Objective,
    *,
    max_seconds: float = float("inf"),
    max_dollars: float = float("inf"),
    in_words: Callable[[float | None, float | None], str] = limits_in_words,
) -> FrontPoint:
    """The best point of a front.

    Args:
        front: see :func:`pareto_front`.
        objective: what is to be as small as possible.
        max_seconds: of an iteration.
        max_dollars: of an iteration.
        in_words: says seconds and dollars of an iteration, where they are given, in the unit of the user's limits.

    Raises:
        ValueError: no point is within the limits; the message says what is nearest.
    """
    allowed = [
        point
        for point in front
        if point.seconds <= max_seconds * (1 + ROUNDING) and point.dollars <= max_dollars * (1 + ROUNDING)
    ]
    by: dict[Objective, Callable[[FrontPoint], float]] = {
        "time": lambda point: point.seconds,
        "cost": lambda point: point.dollars,
    }
    if not allowed:
        ends = " and ".join(
            in_words(point.seconds, point.dollars)
            for point in dict.fromkeys(min(front, key=each) for each in by.values())
        )
        limits = in_words(
            None if math.isinf(max_seconds) else max_seconds, None if math.isinf(max_dollars) else max_dollars
        )
        raise ValueError(f"no plan takes at most {limits}; the fastest and the cheapest take {ends}")
    return min(allowed, key=by[objective])


def _check_bounds_are_known(
    *, schedules: Sequence[str] = ("1f1b",), overlap: bool = False, space: SearchSpace = SIMPLE, **_: Any
) -> None:
    """Refuse options with which a choice of nodes may be faster than its lower bound."""
    for is_known, given in (
        (set(schedules) == {"1f1b"}, f"{schedules=}"),
        (not overlap, f"{overlap=}"),
        (space == SIMPLE, f"{space=}"),
    ):
        if not is_known:
            raise ValueError(
                "plans are compared by price for the schedule 1f1b in the simple search space, without overlap, "
                f"not with {given}; leave it out"
            )


def _worth_their_price(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """The points that no other one is better than, from the fastest to the cheapest."""
    kept: list[FrontPoint] = []
    for point in sorted(points, key=lambda each: (each.seconds, each.dollars)):
        if not kept or point.dollars < kept[-1].dollars * (1 - ROUNDING):
            kept.append(point)
    return kept


class _Search:
    """What was found, and which choice of nodes to try next.

    Args:
        counts: nodes of each type, ``[choices, types]``.
        seconds: lower bounds on the time, ``[choices]``.
        dollars: lower bounds on the cost of an iteration, ``[choices]``.
    """

    def __init__(self, counts: NDArray[np.int64], seconds: NDArray[np.float64], dollars: NDArray[np.float64]) -> None:
        self._counts, self._seconds, self._dollars = counts, seconds, dollars
        self._left = np.ones(len(counts), dtype=bool)
        self._proved = np.zeros(len(counts), dtype=bool)
        self._ratios: list[float] = []
        self.points: list[FrontPoint] = []

    @property
    def knows_both_ends(self) -> bool:
        """Whether the fastest plan and the cheapest one were looked for."""
        return len(self._ratios) > 1 or not self._left.any()

    def most_promising(self, tolerance: float) -> int | None:
        """The choice that should be ahead of all that was found by the largest share; None if there is none."""
        if not self._left.any():
            return None
        # Plans do not reach the bounds; by how much is learned from those that were made.
        ratio = float(np.median(self._ratios)) if self._ratios else 1.0
        ahead = np.full(len(self._seconds), np.inf)
        for point in self.points:
            faster = point.seconds / (self._seconds * ratio)
            cheaper = point.dollars / (self._dollars * ratio + 1e-300)
            ahead = np.minimum(ahead, np.maximum(faster, cheaper))
        ahead[~self._left] = 0.0
        if not self.points:
            return int(np.argmin(np.where(self._left, self._seconds, np.inf)))
        if len(self._ratios) == 1:
            # After the fastest the cheapest, so that both ends are known first.
            return int(np.argmin(np.where(self._left, self._dollars, np.inf)))
        # Many nodes take long to plan for.
        promise = np.where(ahead > 1 + tolerance, (ahead - 1) / self._counts.sum(axis=1), 0.0)
        row = int(np.argmax(promise))
        return row if promise[row] > 0 else None

    def add(self, row: int, points: Sequence[FrontPoint]) -> None:
        """The plans of a choice, the fastest first."""
        self._left[row] = False
        if points:
            self._ratios.append(points[0].seconds / float(self._seconds[row]))
            # The fastest plan leaves some nodes out. So without these nodes it is the fastest, too.
            fewer = (self._counts <= self._counts[row]) & (self._counts >= np.array(points[0].nodes))
            self._left[fewer.all(axis=1)] = False
        self.points += points

    def loosest(self) -> tuple[int, float] | None:
        """The choice whose bound makes the largest gap, and the seconds from which on it makes none; None if none does.

        Each choice is returned once.
        """
        front = _worth_their_price(self.points)
        seconds = np.array([[point.seconds] for point in front])
        dollars = np.array([[point.dollars] for point in front])
        gaps = np.minimum(seconds / self._seconds, dollars / np.maximum(self._dollars, 1e-300))
        gaps[:, self._proved] = 0.0
        row = int(gaps.max(axis=0).argmax())
        if gaps[:, row].max() <= 1 + ROUNDING:
            return None
        self._proved[row] = True
        return row, float(gaps[:, row].max() * self._seconds[row])

    def raise_bounds(self, row: int, seconds: float) -> None:
        """No plan of this choice, and so none of its nodes, takes less than these seconds."""
        fewer = (self._counts <= self._counts[row]).all(axis=1) & (self._seconds < seconds)
        self._dollars[fewer] *= seconds / self._seconds[fewer]
        self._seconds[fewer] = seconds

    def front(self) -> list[FrontPoint]:
        """The points that no other is better than, from the fastest to the cheapest, with their gaps."""
        return [self._with_gap(point) for point in _worth_their_price(self.points)]

    def _with_gap(self, point: FrontPoint) -> FrontPoint:
        faster = point.seconds / self._seconds
        cheaper = point.dollars / np.maximum(self._dollars, 1e-300)
        gap = max(float(np.minimum(faster, cheaper).max()) - 1.0, 0.0)
        return replace(point, gap=gap)


def _point(topology: Topology, profile: ModelProfile, types: Sequence[NodeType], plan: Plan) -> FrontPoint:
    used = {topology.devices[rank].node for replica in plan.rank_order for stage in replica for rank in stage}
    nodes = tuple(len(used & set(each.nodes)) for each in types)
    return FrontPoint(plan, plan_cost(topology, profile, plan), nodes, 0.0)


def _renumbered(plan: Plan, numbers: Sequence[int]) -> Plan:
    """The plan with ranks numbered as in the whole cluster."""
    replicas = tuple(
        replica.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(update={"ranks": tuple(numbers[rank] for rank in stage.ranks)})
                    for stage in replica.stages
                )
            }
        )
        for replica in plan.replicas
    )
    return plan.model_copy(update={"replicas": replicas})
