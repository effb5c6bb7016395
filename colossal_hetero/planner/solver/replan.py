"""Planning again when some devices have become slower: the best plan, or the present one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.topology import Topology
from ..cost.layout_line import layout_of
from ..cost.plan import Plan
from ..cost.price import price
from ..cost.ranked_plan import ranking_of
from ..cost.simulate import PlanSimulation, Transfers, simulate_plan, slowed
from ..profile.fitted_profiles import as_profiled
from ..profile.layer_profile import ModelProfile
from .problem import Problem
from .search import search

TRIED = 5  # best plans by the formula that are simulated


@dataclass(frozen=True, eq=False)
class Replanned:
    """Present plan on the slower devices, and the best plan for them."""

    present: PlanSimulation
    best: PlanSimulation  # same object as ``present`` if no plan is faster

    @property
    def changed(self) -> bool:
        return self.best is not self.present


def replan(
    topology: Topology, profile: ModelProfile, plan: Plan, slow: Mapping[int, float], transfers: Transfers = "blocking"
) -> Replanned:
    """Best plan for ``topology`` with some devices slower, by event simulation; the present one is a candidate."""
    slowed(plan, slow)  # refuses ranks that the plan does not use
    devices, last = len(topology.devices), max(map(max, itertools.chain(*plan.rank_order)))
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
    names = {"cluster": plan.cluster, "profile": plan.profile, "notes": plan.notes}
    again = price(
        topology, profile, layout_of(plan), plan.rank_order, order_seconds=plan.order_seconds, method=plan.method
    )
    present = simulate_plan(again.model_copy(update=names), transfers=transfers)
    problem = Problem(
        topology=topology,
        profile=profile,
        global_batch=plan.global_batch,
        schedules=tuple(dict.fromkeys(("1f1b", plan.schedule))),
        model_chunks=(max(plan.chunks_per_stage, 2),),
    )
    try:
        found = search(problem, keep=TRIED).plans
    except ValueError:
        # No plan fits, so the present one remains.
        return Replanned(present, present)
    files = {"cluster": plan.cluster, "profile": plan.profile}
    others = [simulate_plan(each.plan.model_copy(update=files), transfers=transfers) for each in found]
    best = min(others, key=lambda each: ranking_of(each.plan, each.seconds))
    limit = ranking_of(present.plan, present.seconds) * (1 - 1e-9)
    # Other times of the same plan are rounding.
    return Replanned(present, best if ranking_of(best.plan, best.seconds) < limit else present)
