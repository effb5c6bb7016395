"""Sailor's simulator, if its repository is there: what it says a plan takes, and whether it fits in memory.

Nothing of Sailor is part of this package. A checkout of github.com/eth-easl/sailor is given by its folder; the commit
that this was written for is in ``README.md``. It needs pandas. Sailor's simulator takes pipelines that have the same
number of micro-batches; its stages have layers, which include the embedding and the head.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.plans.plan import Plan, Replica
from colossal_hetero.planner.profile.layer_profile import ModelProfile

__all__ = ["SailorSimulator", "load_sailor"]

ZONE = "us-central1-a"
"""A zone in Sailor's files; all nodes are in one."""


class SailorSimulator:
    """Prices plans of one model; see :func:`load_sailor`."""

    def __init__(self, simulator_class: Any, checkout: Path, profile: ModelProfile) -> None:
        planner = checkout / "sailor" / "Planner"
        self._class, self._profile = simulator_class, profile
        self._path = checkout.parent
        self._sizes = json.loads((planner / "llm_info.json").read_text())
        folder = planner / "sailor_planner" / "profiles" / profile.name
        self._times = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/profile.json")}

    def seconds(self, topology: Topology, plan: Plan) -> tuple[float, bool] | str:
        """Seconds of an iteration and whether it fits in memory, or why there is no answer."""
        if plan.schedule != "1f1b" or any(stage.recompute for replica in plan.replicas for stage in replica.stages):
            return "its schedule or recomputation is unknown to Sailor"
        if len({replica.micro_batches for replica in plan.replicas}) > 1:
            return "pipelines have different numbers of micro-batches"
        known = {"global_batch_size": plan.global_batch, "optimizer": "Adam", "model": plan.model}
        known["num_all_layers"] = self._profile.layers
        described = self._described(topology, plan)
        try:
            # It prints what it computes.
            with contextlib.redirect_stdout(io.StringIO()):
                simulator = self._class(str(self._path), known, self._sizes, False, {plan.model: self._times}, ZONE)
                seconds, *_ = simulator.simulate_iteration_time(described)
                fits = simulator.check_config_fits(described)
        except (KeyError, IndexError, ZeroDivisionError) as error:
            return f"Sailor has no data: {type(error).__name__} {error}"
        return float(seconds), bool(fits)

    def _described(self, topology: Topology, plan: Plan) -> dict[str, Any]:
        """The plan as Sailor writes it; pipelines that are cut alike are one, with a number of replicas per stage."""
        shapes: dict[object, list[Replica]] = {}
        for replica in plan.replicas:
            shapes.setdefault(tuple((stage.blocks, stage.width) for stage in replica.stages), []).append(replica)
        pipelines = []
        for replicas in shapes.values():
            first = replicas[0].stages
            layers = [
                list(range(a + self._profile.before, b + self._profile.before)) for a, b in (s.blocks for s in first)
            ]
            layers[0] = [*range(self._profile.before), *layers[0]]
            layers[-1] += list(range(plan.blocks + self._profile.before, self._profile.layers))
            stages = []
            for index in range(len(first)):
                members = []
                for replica in replicas:
                    stage = replica.stages[index]
                    node = topology.nodes[topology.devices[stage.ranks[0]].node]
                    member = [[[stage.device, len(node.devices), ZONE]], plan.degree(stage)]
                    members += [member] * stage.width
                stages.append(members)
            widths = [len(members) for members in stages]
            pipelines.append(
                {"num_stages": len(first), "layers_per_stage": layers, "tmp_per_stage": stages, "dp": widths}
            )
        return {"zone": ZONE, "pipeline_list": pipelines, "mbs": plan.micro_batch, "gbs": plan.global_batch}


def load_sailor(checkout: Path | None, profile: ModelProfile) -> SailorSimulator | str:
    """The simulator for a model, or why there is none.

    Args:
        checkout: A checkout of Sailor's repository; its folder must be named "sailor", as Sailor's simulator expects.
        profile: Of the model.
    """
    if checkout is None:
        return "no checkout was given with --sailor"
    if checkout.name != "sailor" or not (checkout / "sailor" / "Planner" / "llm_info.json").is_file():
        return f"{checkout} is not a checkout of Sailor's repository in a folder named sailor"
    sys.path.insert(0, str(checkout))
    try:
        module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
    except ImportError as error:
        return f"Sailor's simulator cannot be imported: {error}"
    finally:
        sys.path.remove(str(checkout))
    return SailorSimulator(module.Simulator, checkout, profile)
