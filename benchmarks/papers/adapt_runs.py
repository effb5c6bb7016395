"""Data-parallel training on two ranks whose second one is under a CPU quota (times for ADAPT's figures).

sudo python -m benchmarks.papers.adapt_runs --out FILE.json

The program does not know the quota. First it is 0.6; then it falls from 1 to a quarter in steps. Runs with equal
batches, with batches divided again every 24 iterations, as ADAPT does, and with ours take turns in the same processes.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.common import make_vit, quota_on, read_options, start_ranks
from benchmarks.data_parallel.turns import Turns, digits
from colossal_hetero import BatchConfig, HeteroZeroPlugin
from colossal_hetero.common.files import write_json

BATCH = 96
STEADY, RAMP = 0.6, (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.25)
ITERATIONS = 12
"""Of each run at each quota."""
RUNS: dict[str, dict[str, Any]] = {
    "equal": {"method": "uniform"},
    "adapt": {"method": "adapt", "check_every": 24},
    "ours": {"check_every": 4},
}


def train(quota: float, runs: list[Turns], iterations: int) -> dict[str, list[Any]]:
    """By run: its median seconds at this quota, its division at the end, and all seconds."""
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    with quota_on(1, quota):
        for _ in range(iterations):
            for run in runs:
                dist.barrier()
                seconds[run.name].append(run.iterate())
        dist.barrier()
    return {run.name: [median(seconds[run.name]), run.division, seconds[run.name]] for run in runs}


def main() -> None:
    arguments = read_options(__doc__, out=Path)
    start_ranks(2)
    data = digits()

    def make_runs() -> list[Turns]:
        plugins = {
            name: HeteroZeroPlugin(0, batches=BatchConfig(global_batch_size=BATCH, **settings))
            for name, settings in RUNS.items()
        }
        return [Turns(name, plugin, make_vit(128, 2), data) for name, plugin in plugins.items()]

    runs = make_runs()
    train(STEADY, runs, 30)  # the first divisions settle
    found = {"steady": train(STEADY, runs, 30)}
    runs = make_runs()
    found |= {f"{quota:g}": train(quota, runs, ITERATIONS) for quota in RAMP}
    if dist.get_rank() == 0:
        write_json(found, arguments.out)


if __name__ == "__main__":
    main()
