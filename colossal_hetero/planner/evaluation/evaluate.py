"""What a plan or a layout takes on a cluster: time by the closed form and by simulation, memory, and price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..chunks.arrangements import Ranks
from ..cluster.topology import Topology
from ..layout_line.plan_layout import PlanLayout, layout_of
from ..plans.plan import Plan, StagePlan
from ..plans.runnable import why_not_runnable
from ..plans.simulate import simulate_plan
from ..prices.plan_cost import PlanCost, plan_cost
from ..profile.as_profiled import as_profiled
from ..profile.layer_profile import ModelProfile
from .layout_places import exchanged_places, first_places, look
from .layout_pricer import LayoutPricer
from .layout_slots import SlotType, available_slots, slot_type

__all__ = ["EvaluatedPlan", "evaluate_layout", "evaluate_plan", "why_other_devices"]

MAX_EXCHANGES = 2_000
"""Exchanges of two slots that are tried at most."""
LEAST_GAIN = 1e-9
"""Share of the time by which an exchange must be faster, so that rounding is not taken for a gain."""


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A plan on a cluster."""

    plan: Plan
    """With the times and the memory that are predicted for this cluster and profile."""
    simulated_seconds: float
    """Of an iteration, by event simulation."""
    cost: PlanCost | None
    """None if the cluster has no prices, or not of all devices."""

    @property
    def fullest(self) -> StagePlan:
        """The stage whose devices have the smallest share of their memory left."""
        return max(_stages(self.plan), key=lambda stage: stage.memory_bytes / stage.memory_available_bytes)

    @property
    def too_large(self) -> list[tuple[int, int, StagePlan]]:
        """Stages that need more memory than their devices have: the numbers of replica and stage, and the stage."""
        return [
            (number, index, stage)
            for number, replica in enumerate(self.plan.replicas)
            for index, stage in enumerate(replica.stages)
            if stage.memory_bytes > stage.memory_available_bytes
        ]

    @property
    def fits(self) -> bool:
        """Whether all stages fit in memory."""
        return not self.too_large

    @property
    def problem(self) -> str | None:
        """Why the plugin cannot run the plan, apart from memory; None if it can."""
        return why_not_runnable(self.plan)


def evaluate_layout(
    topology: Topology,
    profile: ModelProfile,
    layout: PlanLayout,
    *,
    global_batch: int | None = None,
    overlap: bool = False,
) -> EvaluatedPlan:
    """The layout on devices of the cluster, which are chosen as the planner places slots.

    Slots of one kind are then exchanged as long as that makes the iteration shorter, at most
    :data:`MAX_EXCHANGES` times. A plan that fits in memory comes before one that does not.

    Args:
        topology: Machines. If the profile was taken on them, each device has the times that were measured on it.
        profile: Times and sizes of the model's layers on the kinds of devices in ``layout``.
        layout: What to evaluate; its micro-batches have a size.
        global_batch: Samples per iteration. None: what the layout says. If the layout does not say how many
            micro-batches each pipeline has, they are divided so that the last pipeline ends as early as possible.
        overlap: Whether communication between pipelines overlaps with passes, see
            :func:`~colossal_hetero.planner.plans.overlap.exposed_seconds`.

    Raises:
        ValueError: The layout does not fit the model, the profile or the cluster. If it was read from a line, the error
            is a :class:`~colossal_hetero.io.marked_error.MarkedError` where it can name a place.
    """
    topology = as_profiled(topology, profile)
    slots = available_slots(topology, layout)
    ranks_of = {each: of_type.slots for each, of_type in slots.items()}
    pricer = LayoutPricer(topology, profile, layout, ranks_of, global_batch=global_batch, overlap=overlap)
    seen: set[object] = set()

    def priced(tried: Iterator[Ranks]) -> Iterator[Plan | ValueError]:
        for ranks in tried:
            key = look(topology, ranks)
            if key not in seen:
                seen.add(key)
                try:
                    yield pricer.plan(ranks)
                except ValueError as error:
                    yield error

    first = list(priced(first_places(topology, slots, layout)))
    plans = [each for each in first if isinstance(each, Plan)]
    if not plans:
        raise next(each for each in first if isinstance(each, ValueError))

    def better(plan: Plan) -> Plan | None:
        """A better one after an exchange of two slots."""
        slowest = max(range(len(plan.replicas)), key=lambda number: plan.replicas[number].pipeline_seconds)
        limit = _order(plan, 1 - LEAST_GAIN)
        for each in priced(exchanged_places(plan.rank_order, slots, slowest)):
            if isinstance(each, Plan) and _order(each) < limit:
                return each
            if len(seen) >= MAX_EXCHANGES:
                break
        return None

    def improved(plan: Plan) -> Plan:
        while (found := better(plan)) is not None:
            plan = found
        return plan

    best = min(map(improved, sorted(plans, key=_order)), key=_order)
    return _evaluated(topology, profile, best)


def evaluate_plan(topology: Topology, profile: ModelProfile, plan: Plan, *, overlap: bool = False) -> EvaluatedPlan:
    """The plan with its own ranks on this cluster and profile.

    Raises:
        ValueError: The cluster has no such ranks or other kinds of devices there, or the profile is of another model.
    """
    topology = as_profiled(topology, profile)
    problem = why_other_devices(topology, plan)
    if problem is not None:
        raise ValueError(problem)
    layout = layout_of(plan)
    ranks = plan.rank_order
    slots: dict[SlotType, list[tuple[int, ...]]] = {}
    for row, pipeline in zip(ranks, layout.pipelines, strict=True):
        for group, stage in zip(row, pipeline.stages, strict=True):
            slots.setdefault(slot_type(stage), []).append(group)
    pricer = LayoutPricer(topology, profile, layout, slots, order_seconds=plan.order_seconds, overlap=overlap)
    again = pricer.plan(ranks).model_copy(update={"method": plan.method})
    return _evaluated(topology, profile, again)


def why_other_devices(topology: Topology, plan: Plan) -> str | None:
    """Why the ranks of ``plan`` are not its devices in this cluster; None if they are."""
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.stages):
            place = f"stage {index} of replica {number}"
            for rank in stage.ranks:
                if rank >= len(topology.devices):
                    return f"{place} has rank {rank}, but the cluster has only ranks 0 to {len(topology.devices) - 1}"
                kind = topology.devices[rank].kind.name
                if kind != stage.device:
                    return f"{place} is on {stage.device}, but rank {rank} of the cluster is {kind}"
            if len({topology.devices[rank].node for rank in stage.ranks}) > 1:
                return f"the tensor-parallel group of {place} is in several nodes of the cluster"
    return None


def _order(plan: Plan, factor: float = 1.0) -> tuple[int, float, float]:
    """By which plans are compared: what fits in memory, then the fastest, then the one with the least work.

    Exchanges go on with plans that are as fast as before, but in which other pipelines are faster.

    Args:
        plan: Which one.
        factor: Its times are multiplied by it.
    """
    too_large = sum(stage.memory_bytes > stage.memory_available_bytes for stage in _stages(plan))
    work = sum(replica.pipeline_seconds for replica in plan.replicas)
    # Ten digits, so that rounding does not count.
    return too_large, float(f"{plan.iteration_seconds:.9e}"), work * factor


def _stages(plan: Plan) -> list[StagePlan]:
    return [stage for replica in plan.replicas for stage in replica.stages]


def _evaluated(topology: Topology, profile: ModelProfile, plan: Plan) -> EvaluatedPlan:
    known = all(node.dollars_per_hour is not None for node in topology.nodes)
    cost = plan_cost(topology, profile, plan) if known else None
    return EvaluatedPlan(plan, simulate_plan(plan).seconds, cost)
