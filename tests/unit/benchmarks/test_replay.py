"""The simulation of training on a trace of spot devices, computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.elastic.replay import Change, Costs, FitPlan, FittedPlan, Holdings, Job, elastic, read_trace, restarted
from colossal_hetero.elastic.held_layers import HeldLayers

SECONDS = {2: 20.0, 3: 15.0, 4: 10.0}
"""Iteration time by the number of devices; one device cannot hold the model."""
COSTS = Costs(load=10.0, save_every=2)
"""A recovery takes 4.5 s, a join 2.5 s, each with 0.5 s of moving; a restart takes 48 s."""


def plans(*, pipeline: bool = False) -> FitPlan:
    """Plans that use all devices; each device holds all layers, or its own ones in a pipeline."""

    def fit(devices: frozenset[int], held: Holdings) -> FittedPlan | None:
        if len(devices) not in SECONDS:
            return None
        ranges = [(place, place + 1) if pipeline else (0, 4) for place in range(len(devices))]
        holdings = {device: HeldLayers((each,)) for device, each in zip(sorted(devices), ranges, strict=True)}
        return FittedPlan(SECONDS[len(devices)], holdings, move_seconds=0.5)

    return fit


def trace(*counts: tuple[float, int]) -> list[Change]:
    return [Change(seconds, frozenset(range(number))) for seconds, number in counts]


def totals(job: Job) -> tuple[int, int, int, float, float]:
    return job.done, job.repeated, job.recoveries, job.paused, job.waited


def test_jobs_computed_by_hand() -> None:
    loss, join = trace((0, 4), (25, 2)), trace((0, 2), (30, 4))
    # Two iterations, 5 s of the third one, 5 s of recovery, three iterations of 20 s, 10 s of another one.
    assert totals(elastic(loss, 100.0, plans(), COSTS)) == (5, 1, 1, 5.0, 0.0)
    # The last holder of layers is gone, and the second iteration has just been saved.
    assert totals(elastic(loss, 100.0, plans(pipeline=True), COSTS)) == (5, 1, 1, 14.5, 0.0)
    # The processes have started at 68 s, the fourth iteration ends at 80 s, the pause takes 3 s.
    assert totals(elastic(join, 120.0, plans(), COSTS)) == (7, 0, 1, 3.0, 0.0)
    # One device has to wait from 25 s on; the process of the second one has started at 88 s.
    assert totals(elastic(trace((0, 4), (25, 1), (50, 2)), 131.0, plans(), COSTS)) == (4, 1, 1, 3.0, 63.0)
    # From 73 s on one iteration is finished. The last checkpoint is of iteration 2, or there is none yet.
    assert totals(restarted(loss, 100.0, plans(), COSTS)) == (3, 1, 1, 48.0, 0.0)
    assert totals(restarted(loss, 100.0, plans(), Costs(load=10.0, save_every=3))) == (1, 3, 1, 48.0, 0.0)
    assert restarted(loss, 100.0, plans(), Costs(load=10.0, save=6.0, save_every=2)).done == 1


def test_a_trace_chooses_devices(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rows = zip((5, 15, 25, 35, 45), (3, 3, 1, 4, 4), strict=True)
    path.write_text(json.dumps([{"Time": seconds, "GPUs": gpus} for seconds, gpus in rows]))
    changes, stop = read_trace(path, 4, 0)
    assert [(each.seconds, len(each.devices)) for each in changes] == [(0, 3), (20, 1), (30, 4)] and stop == 40
    assert changes[1].devices < changes[0].devices < changes[2].devices
