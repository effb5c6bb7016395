"""Sailor's simulator, if its repository is there: what it says a plan takes, and whether it fits in memory.

Nothing of Sailor is part of this package. A checkout of github.com/eth-easl/sailor is given by its folder; the commit
that this was written for is in ``README.md``. It needs pandas. Sailor's simulator takes pipelines that have the same
number of micro-batches; its stages have layers, which include the embedding and the head.

:func:`prepare_copy` makes a copy that has our numbers, so that both models see the same inputs. Rows of layer times
that are missing or belong to another model (GPT-Neo-2.7 on GH-96 and A100-80) are written from our profile; a degree
that was not timed, which Sailor reads as 0 s, gets ``NOT_TIMED`` seconds per layer. Bandwidths between different kinds
of GPU are those of the slower kind, for the smaller number of GPUs that send at once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.planner.sailor_tables import BLOCKS_TIMED, GpuChannels
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan, Replica
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile

ZONE = "us-central1-a"
"""A zone in Sailor's files; all nodes are in one."""
NOT_TIMED = 1000.0


class SailorPrice(NamedTuple):
    """What Sailor's simulator says of a plan."""

    seconds: float
    fits: bool
    """In memory. Sailor counts the whole optimizer state on each member, also in ZeRO stage 1."""


class SailorSimulator:
    """Prices plans of one model; see :func:`load_sailor`."""

    def __init__(self, module: Any, checkout: Path, profile: ModelProfile) -> None:
        planner = checkout / "sailor" / "Planner"
        self._module, self._profile = module, profile
        self._path = checkout.parent
        self._sizes = json.loads((planner / "llm_info.json").read_text())
        folder = planner / "sailor_planner" / "profiles" / profile.name
        times = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/profile.json")}
        self._times = {kind: each for kind, each in times.items() if _layers(each) == profile.layers}
        self._other_models = sorted(set(times) - set(self._times))

    def price(self, topology: Topology, plan: Plan) -> SailorPrice | str:
        """What Sailor's simulator says, or why there is no answer."""
        stages = [stage for replica in plan.replicas for stage in replica.stages]
        if plan.schedule != "1f1b" or any(stage.recompute for stage in stages):
            return "its schedule or recomputation is unknown to Sailor"
        micro_batches = math.ceil(plan.global_batch / (plan.micro_batch * len(plan.replicas)))
        if max(replica.micro_batches for replica in plan.replicas) != micro_batches:
            return "its pipelines have different numbers of micro-batches"
        for kind in {stage.device for stage in stages}:
            if kind in self._other_models:
                return f"Sailor's times of {kind} are those of another model"
        known = {"global_batch_size": plan.global_batch, "optimizer": "Adam", "model": plan.model}
        known["num_all_layers"] = self._profile.layers
        described = self._described(topology, plan)
        try:
            # It prints what it computes.
            with contextlib.redirect_stdout(io.StringIO()):
                times = {plan.model: self._times}
                simulator = self._module.Simulator(str(self._path), known, self._sizes, False, times, ZONE)
                seconds, *_ = simulator.simulate_iteration_time(described)
                fits = simulator.check_config_fits(described)
        except (KeyError, IndexError, ZeroDivisionError) as error:
            return f"Sailor has no data: {type(error).__name__} {error}"
        return SailorPrice(float(seconds), bool(fits))

    def _described(self, topology: Topology, plan: Plan) -> dict[str, Any]:
        """The plan as Sailor writes it; pipelines that are cut alike are one, with members in each stage."""
        shapes: dict[object, list[Replica]] = {}
        for replica in plan.replicas:
            shapes.setdefault(tuple(stage.blocks for stage in replica.stages), []).append(replica)
        groups = list(shapes.values())
        if len({len(replicas) for replicas in groups}) > 1:
            # Sailor takes all pipelines to have as many members as the last one.
            groups = [[replica] for replica in plan.replicas]
        pipelines = []
        for replicas in groups:
            first = replicas[0].stages
            layers = [
                list(range(a + self._profile.before, b + self._profile.before)) for a, b in (s.blocks for s in first)
            ]
            layers[0] = [*range(self._profile.before), *layers[0]]
            layers[-1] += list(range(plan.blocks + self._profile.before, self._profile.layers))
            stages = []
            for index in range(len(first)):
                members: list[Any] = []
                for replica in replicas:
                    stage = replica.stages[index]
                    node = topology.nodes[topology.devices[stage.ranks[0]].node]
                    members.append([[[stage.device, len(node.devices), ZONE]], plan.tensor_parallel])
                stages.append(members)
            dp = [len(members) for members in stages]
            pipelines.append({"num_stages": len(first), "layers_per_stage": layers, "tmp_per_stage": stages, "dp": dp})
        return {"zone": ZONE, "pipeline_list": pipelines, "mbs": plan.micro_batch, "gbs": plan.global_batch}


def _layers(times: dict[str, Any]) -> int:
    """How many layers a profile of Sailor has."""
    return max((len(layers) for degrees in times.values() for layers in degrees.values()), default=0)


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
    return SailorSimulator(module, checkout, profile)


def prepare_copy(
    checkout: Path,
    folder: Path,
    profiles: Iterable[ModelProfile],
    channels: Mapping[str, GpuChannels],
    micro_batches: Sequence[int],
) -> Path:
    """Copies what the simulator needs to ``folder/sailor`` and writes our numbers there. Returns that path."""
    copy = folder / "sailor"
    ignore = shutil.ignore_patterns(
        "baselines", "validation", "clariden", "__pycache__", "*.o", "*.so", "*.bin", "*.pdf"
    )
    for part in ("Planner", "providers", "profiling"):
        shutil.copytree(checkout / "sailor" / part, copy / "sailor" / part, ignore=ignore)
    _write(copy / "sailor" / "providers" / "multizone_bandwidths_het.json", bandwidth_rows(channels))
    for profile in profiles:
        for kind in profile.devices:
            path = copy / "sailor/Planner/sailor_planner/profiles" / profile.name / kind / "profile.json"
            _write(path, sailor_times(profile, kind, micro_batches, channels[kind].between))
    return copy


def bandwidth_rows(channels: Mapping[str, GpuChannels]) -> dict[str, Any]:
    """Bandwidths between nodes as Sailor's file has them: zone, kind, number of GPUs; of the sender, then of the
    receiver; then the coefficients of the curve and the largest bandwidth in bytes/s."""
    ends = [(kind, number) for kind, each in channels.items() for number in each.between]
    rows: dict[str, Any] = {}
    for kind, number in ends:
        for other, other_number in ends:
            fewer = min(number, other_number)
            choices = [channels[each].between for each in (kind, other)]
            slower = min(
                (each[max(n for n in each if n <= fewer)] for each in choices), key=lambda each: each.bytes_per_second
            )
            row = [list(slower.curve or ()), slower.bytes_per_second]
            place = rows.setdefault(kind, {}).setdefault(str(number), {}).setdefault(ZONE, {})
            place.setdefault(other, {})[str(other_number)] = row
    return {ZONE: rows}


def sailor_times(
    profile: ModelProfile, kind: str, micro_batches: Sequence[int], degrees: Iterable[int]
) -> dict[str, Any]:
    """Our layer times of one kind of GPU as Sailor writes them; of these degrees, those that were not timed have
    ``NOT_TIMED``.

    The update is that of the model whose step was timed: an embedding, two blocks and a head.
    """
    found = {(each.micro_batch, each.tensor_parallel): each for each in profile.times if each.device == kind}
    times: dict[str, Any] = {}
    for size in micro_batches:
        by_degree = times.setdefault(str(size), {})
        for degree in sorted(degrees):
            each = found.get((size, degree))
            by_degree[str(degree)] = {
                str(layer): [NOT_TIMED, NOT_TIMED, 0.0] if each is None else _layer(each, layer, profile)
                for layer in range(profile.layers)
            }
    return times


def _layer(times: LayerTimes, layer: int, profile: ModelProfile) -> list[float]:
    update = times.update_seconds
    step = sum(update[: profile.before + BLOCKS_TIMED]) + sum(update[profile.layers - profile.after :])
    return [times.forward_seconds[layer], times.backward_seconds[layer], step]


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
