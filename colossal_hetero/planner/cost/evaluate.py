"""Time of a plan or a layout on a cluster, by the formula and by simulation, with its memory and its price."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...common.text import count, duration
from ..cluster.topology import Topology
from ..profile.fitted_profiles import as_profiled
from ..profile.layer_profile import ModelProfile
from .chunked_price import Ranks
from .layout_line import PlanLayout, layout_of
from .plan import Plan, Replica, StagePlan
from .price import Pricer, available_slots, exchanged_places, first_places, look, price
from .ranked_plan import ROUNDING
from .runnable import why_not_runnable
from .simulate import simulate_plan


def differences(one: Plan, other: Plan) -> list[str]:
    """Differences as "what: of one → of other", the causes of the time first; empty if only ranks differ."""
    values = zip(time_parts(one).items(), time_parts(other).values(), strict=True)
    found = [f"{name}: {duration(a)} → {duration(b)}" for (name, a), b in values if abs(a - b) > 0.005 * max(a, b)]
    before, after = _parts(one), _parts(other)
    found += [f"{name}: {before[name]} → {after[name]}" for name in before if before[name] != after[name]]
    return found


LONGEST = "longest stage, in all"


def slowest_replica(plan: Plan) -> Replica:
    return max(plan.replicas, key=lambda replica: replica.pipeline_seconds)


def time_parts(plan: Plan) -> dict[str, float]:
    """Parts of the time of an iteration, by the formula, in seconds."""
    slowest = slowest_replica(plan)
    steady = slowest.micro_batches * max(stage.micro_batch_seconds for stage in slowest.stages)
    update = max(stage.update_seconds for stage in slowest.stages)
    return {
        LONGEST: steady,
        "filling and emptying the pipelines": max(slowest.pipeline_seconds - steady - update, 0.0),
        "optimizer steps": update,
        "sums of gradients": plan.synchronization_seconds,
    }


def _parts(plan: Plan) -> dict[str, str]:
    stages = _stages(plan)
    blocks: Counter[str] = Counter()
    for stage in stages:
        blocks[stage.device] += sum(stop - start for start, stop in stage.block_ranges)
    shares = [f"{number / blocks.total():.0%} on {device}" for device, number in sorted(blocks.items())]
    return {
        "schedule": plan.schedule,
        "tensor-parallel degree": str(plan.tensor_parallel),
        "replicas": count(len(plan.replicas), "replica"),
        "stages of a replica": _range([len(replica.stages) for replica in plan.replicas]),
        "stages that recompute": str(sum(stage.recompute for stage in stages)),
        "ZeRO stage": str(plan.zero_stage),
        "samples of a micro-batch": str(plan.micro_batch),
        "micro-batches of a replica": _range([replica.micro_batches for replica in plan.replicas]),
        "devices": devices_in_words(plan),
        "share of the blocks": ", ".join(shares),
    }


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def devices_in_words(plan: Plan) -> str:
    """The devices that the plan uses: ``4 × A100-40 + 8 × V100-16``."""
    devices = Counter(stage.device for stage in _stages(plan) for _ in stage.ranks)
    return " + ".join(f"{number} × {device}" for device, number in sorted(devices.items()))


def _stages(plan: Plan) -> list[StagePlan]:
    return [stage for replica in plan.replicas for stage in replica.stages]


GIGABYTE = 1e9
HOUR = 3600.0


@dataclass(frozen=True)
class PlanCost:
    dollars_per_hour: float  # price of all nodes of which the plan uses a device: a node is paid for as a whole
    egress_dollars: float  # per iteration, of what is sent between clusters
    iteration_seconds: float

    @property
    def dollars_per_iteration(self) -> float:
        return self.dollars_per_hour * self.iteration_seconds / HOUR + self.egress_dollars


def check_prices(topology: Topology) -> None:
    unknown = [node.name for node in topology.nodes if node.dollars_per_hour is None]
    if unknown:
        names = ", ".join(unknown[:4]) + (f" and {len(unknown) - 4} others" if len(unknown) > 4 else "")
        raise ValueError(
            f"the price of {names} is not known; give these nodes dollars_per_hour in the cluster file, or their kinds "
            "of devices: [kinds.NAME] with dollars_per_hour"
        )


def plan_cost(topology: Topology, profile: ModelProfile, plan: Plan) -> PlanCost:
    check_prices(topology)
    used = {topology.devices[rank].node for stage in _stages(plan) for rank in stage.ranks}
    rate = sum(topology.nodes[number].dollars_per_hour or 0.0 for number in sorted(used))
    cluster = [device.cluster for device in topology.devices]
    prices = {frozenset((one, other)): price for one, other, price in topology.egress}
    dollars = sum(
        prices.get(frozenset((cluster[one], cluster[other])), 0.0) * sent / GIGABYTE
        for one, other, sent in (_sent_bytes(profile, plan) if prices else ())
    )
    return PlanCost(rate, dollars, plan.iteration_seconds)


def _sent_bytes(profile: ModelProfile, plan: Plan) -> Iterator[tuple[int, int, float]]:
    # Sizes do not depend on the kind of device.
    costs = profile.costs(plan.replicas[0].stages[0].device, plan.tensor_parallel, plan.micro_batch)
    for replica in plan.replicas:
        for before, after in pairwise(replica.stages):
            # Activations one way and their gradients the other; each member of a tensor-parallel group sends all.
            message = 2.0 * replica.micro_batches * float(costs.output_bytes[before.blocks[1] - 1])
            for one, other in zip(before.ranks, after.ranks, strict=True):
                yield one, other, message
    for block, gradients in enumerate(costs.gradient_bytes.tolist()):
        holders = [_holder(replica, block).ranks for replica in plan.replicas]
        for ring in zip(*holders, strict=True):
            for one, other in pairwise([*ring, ring[0]]):
                yield one, other, 2.0 * (len(ring) - 1) / len(ring) * gradients


def _holder(replica: Replica, block: int) -> StagePlan:
    """The stage that sums the gradients of a block."""
    return next(stage for stage in replica.stages if any(a <= block < b for a, b in stage.block_ranges))


MAX_EXCHANGES = 2_000


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A plan on a cluster, with its times and memory as predicted for this cluster and profile."""

    plan: Plan
    simulated_seconds: float
    cost: PlanCost | None  # None if the cluster has no prices, or not of all devices

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
        return not self.too_large

    @property
    def problem(self) -> str | None:
        """Reason why the plugin cannot run the plan, apart from memory; None if it can."""
        return why_not_runnable(self.plan)


def evaluate_layout(
    topology: Topology,
    profile: ModelProfile,
    layout: PlanLayout,
    *,
    global_batch: int | None = None,
    overlap: bool = False,
) -> EvaluatedPlan:
    """The layout on devices that are chosen as the planner places slots. Slots of one kind are then exchanged as long
    as that makes the iteration shorter. A plan that fits in memory comes before one that does not."""
    topology = as_profiled(topology, profile)
    slots = available_slots(topology, layout)
    pricer = Pricer(topology, profile, layout, slots, global_batch=global_batch, overlap=overlap)
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
        slowest = max(range(len(plan.replicas)), key=lambda number: plan.replicas[number].pipeline_seconds)
        limit = _order(plan, 1 - ROUNDING)
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
    topology = as_profiled(topology, profile)
    problem = why_other_devices(topology, plan)
    if problem is not None:
        raise ValueError(problem)
    again = price(
        topology,
        profile,
        layout_of(plan),
        plan.rank_order,
        order_seconds=plan.order_seconds,
        overlap=overlap,
        method=plan.method,
    )
    return _evaluated(topology, profile, again)


def why_other_devices(topology: Topology, plan: Plan) -> str | None:
    """Reason why the ranks of ``plan`` are not its devices in this cluster; None if they are."""
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
    """Key by which plans are compared: what fits in memory, then the fastest, then the least work. The last lets
    exchanges go on with plans that are as fast as before, but in which other pipelines are faster."""
    too_large = sum(stage.memory_bytes > stage.memory_available_bytes for stage in _stages(plan))
    work = sum(replica.pipeline_seconds for replica in plan.replicas)
    # Ten digits, so that rounding does not count.
    return too_large, float(f"{plan.iteration_seconds:.9e}"), work * factor


def _evaluated(topology: Topology, profile: ModelProfile, plan: Plan) -> EvaluatedPlan:
    known = all(node.dollars_per_hour is not None for node in topology.nodes)
    cost = plan_cost(topology, profile, plan) if known else None
    return EvaluatedPlan(plan, simulate_plan(plan).seconds, cost)
