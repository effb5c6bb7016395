"""Planning again when some devices have become slower: the best plan, or the present one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.topology import Topology
from ..cost.plan import Plan
from ..cost.predict import predict_plan
from ..cost.predict_chunked import predict_chunked_plan
from ..cost.ranked_plan import ranking_seconds
from ..cost.runnable import why_not_runnable, why_unlike_stages
from ..cost.simulate import PlanSimulation, simulate_plan, slowed
from ..profile.fitted_profiles import as_profiled
from ..profile.layer_profile import ModelProfile
from ..stages.event_simulation import Transfers
from .make_plans import make_plans

__all__ = ["Replanned", "replan"]

TRIED = 5
"""Best plans by the closed form that are simulated."""


@dataclass(frozen=True, eq=False)
class Replanned:
    """Present plan on the slower devices, and the best plan for them."""

    present: PlanSimulation
    best: PlanSimulation
    """Same object as ``present`` if no plan is faster."""

    @property
    def changed(self) -> bool:
        return self.best is not self.present


def replan(
    topology: Topology,
    profile: ModelProfile,
    plan: Plan,
    slow: Mapping[int, float],
    transfers: Transfers = "blocking",
) -> Replanned:
    """Best plan for ``topology`` with some devices slower, by event simulation; the present one is a candidate."""
    before = slowed(plan, slow)
    unlike = "it uses ZeRO stage 1" if plan.zero_stage else why_unlike_stages(plan)
    if unlike is not None:
        raise ValueError(
            f"this plan cannot be compared with others on slower devices: {unlike}; make a new plan for these"
        )
    devices, last = len(topology.devices), max(rank for group in _groups(plan) for rank in group)
    if last >= devices:
        raise ValueError(f"the plan uses rank {last}, but the cluster has only ranks 0 to {devices - 1}; give its own")
    if profile.blocks != plan.blocks:
        raise ValueError(
            f"the plan has {plan.blocks} blocks, but the profile {profile.name} has {profile.blocks}; give the profile "
            "that the plan was made from"
        )
    topology = as_profiled(topology, profile)
    # Each device has its measured times, so the ranks that measured them are no longer needed.
    profile = profile.model_copy(update={"rank_devices": ()})
    slower = tuple(
        dataclasses.replace(device, speed=device.speed / slow.get(rank, 1.0))
        for rank, device in enumerate(topology.devices)
    )
    topology = dataclasses.replace(topology, devices=slower)
    if plan.symmetric:
        names = {"cluster": plan.cluster, "profile": plan.profile, "notes": plan.notes}
        before = _predicted_again(topology, profile, plan).model_copy(update=names)
    present = simulate_plan(before, transfers=transfers)
    try:
        found = make_plans(
            topology,
            profile,
            global_batch=plan.global_batch,
            schedules=tuple(dict.fromkeys(("1f1b", plan.schedule))),
            model_chunks=(max(plan.chunks_per_stage, 2),),
            runnable=why_not_runnable(plan) is None,
            keep=TRIED,
            cluster_file=plan.cluster,
            profile_file=plan.profile,
        )
    except ValueError:
        # No plan fits, so the present one remains.
        return Replanned(present, present)
    others = [simulate_plan(each.plan, transfers=transfers) for each in found]
    best = min(others, key=lambda each: ranking_seconds(each.seconds, equal=each.plan.symmetric))
    # Other times of the same plan are rounding.
    return Replanned(present, best if best.seconds < present.seconds * (1 - 1e-9) else present)


def _predicted_again(topology: Topology, profile: ModelProfile, plan: Plan) -> Plan:
    bounds = (0, *itertools.accumulate(plan.layers_per_chunk))
    if plan.schedule == "1f1b":
        return predict_plan(
            topology,
            profile,
            plan.rank_order,
            micro_batch=plan.micro_batch,
            global_batch=plan.global_batch,
            bounds=bounds,
            method=plan.method,
        )
    return predict_chunked_plan(
        topology,
        profile,
        plan.rank_order,
        schedule=plan.schedule,
        chunks=plan.chunks_per_stage,
        micro_batch=plan.micro_batch,
        global_batch=plan.global_batch,
        bounds=bounds,
        order_seconds=plan.order_seconds,
        method=plan.method,
    )


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    return [group for replica in plan.rank_order for group in replica]
