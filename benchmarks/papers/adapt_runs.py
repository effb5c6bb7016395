"""Data-parallel training on two ranks whose second one is under a CPU quota (times for ADAPT's figures).

sudo python -m benchmarks.papers.adapt_runs --out FILE.json

The program does not know the quota. First it is 0.6; then it falls from 1 to a quarter in steps. Runs with equal
batches, with batches divided again every 24 iterations, as ADAPT does, and with ours take turns in the same processes.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.common import start_ranks
from benchmarks.tensor_parallel.uneven import Turns, digits, make_model
from colossal_hetero import BatchConfig, HeteroZeroPlugin
from colossal_hetero.common.files import write_json
from colossal_hetero.testing.stragglers import cpu_quota

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
    with cpu_quota(quota, 100_000) if dist.get_rank() == 1 and quota < 1 else nullcontext():
        for _ in range(iterations):
            for run in runs:
                dist.barrier()
                seconds[run.name].append(run.iterate())
        dist.barrier()
    return {run.name: [median(seconds[run.name]), run.division, seconds[run.name]] for run in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    start_ranks(2)
    data = digits()

    def make_runs() -> list[Turns]:
        return [
            Turns(
                name,
                HeteroZeroPlugin(0, batches=BatchConfig(global_batch_size=BATCH, **settings)),
                make_model(128, 2, 4),
                data,
                None,
            )
            for name, settings in RUNS.items()
        ]

    runs = make_runs()
    train(STEADY, runs, 30)  # the first divisions settle
    found = {"steady": train(STEADY, runs, 30)}
    runs = make_runs()
    found |= {f"{quota:g}": train(quota, runs, ITERATIONS) for quota in RAMP}
    if dist.get_rank() == 0:
        write_json(found, arguments.out)


if __name__ == "__main__":
    main()
