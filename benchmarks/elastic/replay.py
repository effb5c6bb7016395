"""Training on a recorded trace of spot GPUs, simulated: this package, and restarts from a shared folder.

Sailor's repository (github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich) has the trace that the README uses:
``sailor/Controller/trace_based/a100_trace_16.json``. A trace is a JSON list of how many GPUs are there from a moment
on, ``[{"Time": 0, "GPUs": 14}, ...]``; its last entry is its end. Which devices of the cluster these are, two nodes of
four A100 and two of four V100, is chosen at random. The model is OPT-350 with the profile in ``examples/plans``.

*This package*: losses come without a warning. Those who are left notice them, make a plan, move layers, and compute
the running iteration again. Devices that come start their processes while the others train, and are admitted at the end
of an iteration if the plan with them is faster. If the last holder of a layer is gone, all load the last checkpoint.

*Restart*: all processes end and start again, load the whole state, and compute again what came after the last
checkpoint: at each change, as under torchrun, or only if a device in use is gone or the plan with new ones is faster.

The second table changes one assumption at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import NamedTuple, Protocol

import numpy as np
from scipy.optimize import linear_sum_assignment

from benchmarks.common import print_table
from benchmarks.elastic.replanning import CLUSTER, PROFILE
from benchmarks.plans import simple_plan
from colossal_hetero.elastic.held_layers import HeldLayers, layers_by_rank, missing_bytes
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cluster.topology import Device, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile, load_profile

GLOBAL_BATCH = 256
SEEDS = range(3)
"""Of the random choice of devices. Other global batches, which need plans of their own, have only the first one."""
FOLDER_BYTES_PER_SECOND = 1.2e9
"""AutoHet, section V: cloud storage of 1,200 MB/s."""
AIM = 1.3
ROUNDING = 1e-9

Holdings = Mapping[int, HeldLayers]
"""What devices hold, by the number of the device."""


class Change(NamedTuple):
    """The devices that are there from a moment on, until the next change."""

    seconds: float
    devices: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What recoveries and restarts take, in seconds, and how often the job is saved."""

    dead_wait: float = 2.0
    """Recovery: until the others take a device that is gone for dead."""
    last_call: float = 1.0
    """Recovery and join: how long a meeting waits for more participants."""
    resume: float = 1.5
    """Recovery and join: planning, new groups and a new start, without what moves between devices."""
    start: float = 38.0
    """Until processes have ended and new ones have met, 20 s, and have imported torch and Colossal-AI, 18 s."""
    load: float = 0.0
    """Reading the state of the whole job from the shared folder."""
    save: float = 0.0
    """Writing it there, in the background. A checkpoint can be used when it is whole."""
    save_every: int = 50
    """Iterations from one checkpoint to the next."""


@dataclass(frozen=True)
class FittedPlan:
    """A plan on the devices that are there; those that hold nothing are spares."""

    iteration_seconds: float
    holdings: Holdings
    move_seconds: float = 0.0
    """To bring to each node what its devices lack; all nodes get theirs at the same time."""


class FitPlan(Protocol):
    """Finds the best plan for these devices, which hold ``held`` already; None if no plan fits."""

    def __call__(self, devices: frozenset[int], held: Holdings, /) -> FittedPlan | None: ...


class FittedPlans:
    """Plans by the planner. Sets of devices with as many of each kind in their nodes are planned for once."""

    def __init__(self, topology: Topology, profile: ModelProfile, global_batch: int) -> None:
        self._topology, self._profile, self._global_batch = topology, profile, global_batch
        self._block_bytes = state_bytes(profile)
        numbers = range(len(topology.nodes))
        channels = [topology.node_channel(a, b) for a in numbers for b in range(a)]
        self._link = min(channels, key=lambda channel: channel.bandwidth(1e9))
        self._plans: dict[tuple[tuple[str, int], ...], Plan | None] = {}

    def __call__(self, devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        there = [[device for device in node.devices if device in devices] for node in self._topology.nodes]
        shapes = sorted(
            (self._topology.devices[each[0]].kind.name, len(each), number) for number, each in enumerate(there) if each
        )
        order = [device for *_, number in shapes for device in there[number]]
        part = self._part([number for *_, number in shapes], there)
        key = tuple((kind, count) for kind, count, _ in shapes)
        if key not in self._plans:
            self._plans[key] = self._make_plan(part)
        plan = self._plans[key]
        if plan is None:
            return None
        layers = layers_by_rank(plan)
        holdings, most_bytes = dict[int, HeldLayers](), 0.0
        for node in part.nodes:
            # The devices of a node are alike, so they change places such that the fewest bytes move.
            mine, wanted = [order[rank] for rank in node.devices], [layers.get(rank) for rank in node.devices]
            lacks = np.array(
                [[missing_bytes(held.get(each), want, self._block_bytes) for want in wanted] for each in mine]
            )
            places = linear_sum_assignment(lacks)[1]
            most_bytes = max(most_bytes, float(lacks[range(len(mine)), places].sum()))
            holdings |= {
                device: want for device, place in zip(mine, places, strict=True) if (want := wanted[place]) is not None
            }
        return FittedPlan(plan.iteration_seconds, holdings, self._link.seconds(most_bytes))

    def _part(self, numbers: Sequence[int], there: Sequence[Sequence[int]]) -> Topology:
        """The cluster with these nodes, in this order, and of each of them the devices that are there."""
        nodes, devices = list[Node](), list[Device]()
        for number in numbers:
            ranks = tuple(range(len(devices), len(devices) + len(there[number])))
            devices += [replace(self._topology.devices[each], node=len(nodes)) for each in there[number]]
            nodes.append(replace(self._topology.nodes[number], devices=ranks))
        return replace(self._topology, devices=tuple(devices), nodes=tuple(nodes))

    def _make_plan(self, part: Topology) -> Plan | None:
        try:
            return simple_plan(part, self._profile, global_batch=self._global_batch)
        except ValueError:
            return None


def state_bytes(profile: ModelProfile) -> list[float]:
    """Parameters and optimizer state by block: what moves between devices, and what a checkpoint holds."""
    device = profile.devices[0]
    degree = profile.tensor_parallel_degrees(device)[0]
    costs = profile.costs(device, degree, profile.micro_batches(device, degree)[0])
    return [float(each) for each in (costs.state_bytes - costs.gradient_bytes) * degree]


class Job:
    """The record of a simulated job: iterations that count, those that were repeated, and lost time."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self.done = self.repeated = self.recoveries = 0
        self.paused = self.waited = 0.0
        """Seconds without training, and seconds for which no plan fits."""
        self._saves = [(0, 0.0)]
        """Checkpoints: iteration, and when it is whole."""

    def run(self, since: float, start: float, stop: float, plan: FittedPlan | None, *, lost: bool = False) -> None:
        """A pause from ``since`` to ``start``, then training to ``stop``, where the running iteration may be lost."""
        if plan is None:
            self.waited += stop - since
            return
        now = min(start, stop)
        self.paused += now - since
        while now + plan.iteration_seconds <= stop + ROUNDING:
            now, self.done = now + plan.iteration_seconds, self.done + 1
            # One checkpoint is written at a time; those that are due meanwhile are left out.
            if self.done % self._costs.save_every == 0 and now >= self._saves[-1][1] - ROUNDING:
                self._saves.append((self.done, now + self._costs.save))
        self.repeated += lost and stop - now > ROUNDING

    def drop_unfinished_saves(self, now: float) -> None:
        """Devices are gone, so a checkpoint that is being written does not become whole."""
        self._saves = [save for save in self._saves if save[1] <= now]

    def roll_back(self) -> None:
        """All iterations since the last whole checkpoint must be computed again."""
        saved = self._saves[-1][0]
        self.repeated += self.done - saved
        self.done = saved


def is_faster(plan: FittedPlan | None, present: FittedPlan) -> bool:
    return plan is not None and plan.iteration_seconds < present.iteration_seconds * (1 - ROUNDING)


def restarted(
    changes: Sequence[Change], stop: float, fit: FitPlan, costs: Costs, *, only_if_needed: bool = False
) -> Job:
    """A job that starts all its processes again and loads a checkpoint."""
    runs: list[tuple[float, FittedPlan | None]] = []
    for now, devices in changes:
        plan = fit(devices, {})
        present = runs[-1][1] if runs else None
        keeps = only_if_needed and present is not None and present.holdings.keys() <= devices
        if present is None or not keeps or is_faster(plan, present):
            runs.append((now, plan))
    job = Job(costs)
    for (now, plan), (end, _) in pairwise([*runs, (stop, None)]):
        # A job that can begin at once is already running when the trace starts.
        job.run(now, now + (costs.start + costs.load if now else 0.0), end, plan, lost=end < stop)
        job.recoveries += now > 0 and plan is not None
        if end < stop:
            job.drop_unfinished_saves(end)
            job.roll_back()
    return job


def elastic(changes: Sequence[Change], stop: float, fit: FitPlan, costs: Costs) -> Job:
    """A job that goes on with the devices that are left, as this package trains."""
    job, ready, held = Job(costs), changes[0].devices, dict[int, HeldLayers]()
    plan, since, start, admission = fit(ready, held), 0.0, 0.0, math.inf
    join_seconds = costs.last_call + costs.resume
    for now, lost, came in _events(changes, stop, costs.start):
        if plan is not None and admission <= now:
            larger = fit(ready, plan.holdings)
            if larger is not None and is_faster(larger, plan):
                job.run(since, start, admission, plan)
                job.recoveries += 1
                held, since, plan = dict(plan.holdings), admission, larger
                start = admission + join_seconds + larger.move_seconds
            admission = math.inf
        ready = ready - lost | came
        if plan is not None and now >= start:
            held = dict(plan.holdings)
        if lost & (held.keys() | (plan.holdings.keys() if plan is not None else set())) or (plan is None and came):
            job.run(since, start, now, plan, lost=True)
            job.drop_unfinished_saves(now)
            left = {device: layers for device, layers in held.items() if device not in lost}
            if _pieces(left) < _pieces(held):
                job.roll_back()
                left = {}
            held, since, plan, admission = left, now, fit(ready, left), math.inf
            if plan is not None:
                job.recoveries += 1
                start = now + join_seconds + (costs.dead_wait if lost else 0.0)
                start += plan.move_seconds if held else costs.load
        elif came and plan is not None and admission == math.inf:
            begun = (now - start) / plan.iteration_seconds
            admission = start + max(math.ceil(begun - ROUNDING), 1) * plan.iteration_seconds
    job.run(since, start, stop, plan)
    return job


def _events(
    changes: Sequence[Change], stop: float, start_seconds: float
) -> list[tuple[float, frozenset[int], frozenset[int]]]:
    """Moments, the devices that are lost, and those whose processes have started; the last one is the end."""
    lost: dict[float, frozenset[int]] = defaultdict(frozenset)
    ready: dict[float, frozenset[int]] = defaultdict(frozenset)
    for number, (before, now) in enumerate(pairwise(changes), start=2):
        lost[now.seconds] = before.devices - now.devices
        begins = now.seconds + start_seconds
        # A device that goes before its process has started has never taken part.
        later = [each.devices for each in changes[number:] if each.seconds <= begins]
        ready[begins] |= (now.devices - before.devices).intersection(*later)
    moments = sorted(each for each in {*lost, *ready} if each < stop)
    return [*((each, lost[each], ready[each]) for each in moments), (stop, frozenset(), frozenset())]


def _pieces(holdings: Holdings) -> set[tuple[int, int]]:
    return {(block, each.part) for each in holdings.values() for a, b in each.ranges for block in range(a, b)}


def read_trace(path: Path, devices: int, seed: int) -> tuple[list[Change], float]:
    """When the devices that are there change, and how long the trace lasts. The choice of devices is random."""
    rows = json.loads(path.read_text())
    chance, present, changes = random.Random(seed), frozenset[int](), list[Change]()
    for row in rows:
        if row["GPUs"] > devices:
            sys.exit(f"{path} has {row['GPUs']} GPUs at {row['Time']} s, but the cluster has {devices}")
        more = row["GPUs"] - len(present)
        if more < 0:
            there = present - frozenset(chance.sample(sorted(present), -more))
        else:
            there = present | frozenset(chance.sample(sorted(frozenset(range(devices)) - present), more))
        if not changes or (there != present and row is not rows[-1]):
            changes.append(Change(row["Time"] - rows[0]["Time"], there))
        present = there
    return changes, rows[-1]["Time"] - rows[0]["Time"]


def cases(state: float) -> list[tuple[str, Costs, int]]:
    """What is changed, the costs, and the global batch, for so many bytes of state."""

    def folder(bytes_per_second: float) -> Costs:
        return Costs(load=state / bytes_per_second, save=state / bytes_per_second)

    usual = folder(FOLDER_BYTES_PER_SECOND)
    found = [("the usual ones", usual)]
    for every in (1, 5, 10, 20, 100):
        name = f"a checkpoint every {every} iterations" if every > 1 else "a checkpoint after each iteration"
        found.append((name, replace(usual, save_every=every)))
    found += [
        ("folder of 0.2 GB/s", folder(0.2e9)),
        ("folder of 10 GB/s", folder(10e9)),
        ("processes start in 10 s instead of 38 s", replace(usual, start=10.0)),
        (
            "this package starts its processes again too, and keeps states in memory (recovery by restart, for NCCL)",
            replace(usual, resume=usual.resume + usual.start),
        ),
        ("dead wait of 15 s instead of 2 s", replace(usual, dead_wait=15.0)),
        (
            "most favorable to restarts: checkpoint after each iteration, folder of 10 GB/s, start in 10 s",
            replace(folder(10e9), save_every=1, start=10.0),
        ),
    ]
    batches = [(f"global batch of {batch:,}", usual, batch) for batch in (64, 1024)]
    return [*((name, costs, GLOBAL_BATCH) for name, costs in found), *batches]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help='JSON file: [{"Time": seconds, "GPUs": number}, ...]')
    arguments = parser.parse_args()
    cluster, profile = load_cluster(CLUSTER), load_profile(PROFILE)
    everything = frozenset(range(len(cluster.devices)))
    traces = [read_trace(arguments.trace, len(everything), seed) for seed in SEEDS]
    fits: dict[int, FittedPlans] = {}
    rows, shown, usual_ratios = [], [], list[float]()
    for name, costs, batch in cases(sum(state_bytes(profile))):
        fit = fits.setdefault(batch, FittedPlans(cluster, profile, batch))
        whole = fit(everything, {})
        assert whole is not None
        shares, at_each_change, if_needed = [], [], []
        for changes, stop in traces if batch == GLOBAL_BATCH else traces[:1]:
            job = elastic(changes, stop, fit, costs)
            others = [restarted(changes, stop, fit, costs, only_if_needed=each) for each in (False, True)]
            shares.append(job.done * whole.iteration_seconds / stop)
            for found, other in zip((at_each_change, if_needed), others, strict=True):
                found.append(job.done / other.done if other.done else math.inf)
            if not rows and not shown:
                shown = [("this package", job), ("restart at each change", others[0])]
                shown.append(("restart only if needed", others[1]))
        usual_ratios = usual_ratios or at_each_change
        rows.append((name, f"{100 * mean(shares):.0f}", _spread(at_each_change), _spread(if_needed)))
    changes, stop = traces[0]
    there = [len(each.devices) for each in changes]
    ideal = fits[GLOBAL_BATCH](everything, {})
    assert ideal is not None
    print_table(
        f"{stop:,.0f} s, {len(changes) - 1} changes, {min(there)} to {max(there)} of {len(everything)} devices",
        ("way", "samples/s", "of ideal [%]", "recoveries", "paused [s]", "repeated iterations"),
        [
            (
                name,
                f"{job.done * GLOBAL_BATCH / stop:.2f}",
                f"{100 * job.done * ideal.iteration_seconds / stop:.1f}",
                *(job.recoveries, f"{job.paused:,.0f}", job.repeated),
            )
            for name, job in shown
        ],
    )
    print_table(
        f"mean of {len(SEEDS)} random choices of devices (smallest to largest)",
        ("assumption", "of ideal [%]", "this package / restart", "/ restart only if needed"),
        rows,
    )
    reached = "reached" if min(usual_ratios) >= AIM else "missed"
    print(f"aim: this package / restart at least {AIM} with the usual assumptions; {reached}: {min(usual_ratios):.2f}")


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
