"""Batches that are divided again when a CPU quota is put on rank 1 and taken off in training, check by check.

sudo python -m benchmarks.data_parallel.redivision [--quotas 0.5 0.25] [--stages 1]

The plugin measures both ranks without a quota, and trains with ``check_every``. Then the quota comes, and goes again.
The program does not know of it. The control is the best fixed division: divisions around the one that the quota
suggests are trained with one after the other, under the quota and without it, and the fastest counts. Aim: at most 1.03
times its iteration time from the third check after a change on, and no division that passes the best one by more than 5
%.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch.distributed as dist

from benchmarks.common import make_vit, print_table, quota_on, read_options, start_ranks, steady_seconds
from benchmarks.data_parallel.turns import Turns, digits
from colossal_hetero import BatchConfig, HeteroZeroPlugin

HIDDEN, DEPTH, SAMPLES = 128, 4, 192
CHECK_EVERY, CHECKS = 5, 8
"""Global batches between two checks, and checks in each phase."""
SHARES = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
"""Divisions that are tried for the control: samples of rank 1 relative to those that the quota suggests."""
FIXED_ITERATIONS = 8
"""Of each of them."""


class Run(Turns):
    """A model in training, whose division may be set by hand."""

    def divide(self, samples: Sequence[int]) -> None:
        """Use a fixed division from the next global batch on."""
        loader = self._loader
        loader.divide_by(lambda whole: [[count] for count in samples], loader.global_sampler.drawn_global_batch)


def make_run(stage: int, **settings: Any) -> Run:
    plugin = HeteroZeroPlugin(stage, batches=BatchConfig(global_batch_size=SAMPLES, **settings))
    return Run("", plugin, make_vit(HIDDEN, DEPTH), digits())


def best_fixed(run: Run, suggested: float) -> tuple[float, int]:
    """Seconds of an iteration in the fastest fixed division, and the samples of rank 1 in it."""
    found = []
    for count in sorted({min(max(round(share * suggested), 1), SAMPLES - 1) for share in SHARES}):
        run.divide([SAMPLES - count, count])
        found.append((steady_seconds(run.iterate, FIXED_ITERATIONS), count))
    return min(found)


def measure(quota: float, stage: int) -> list[tuple]:
    fixed = make_run(stage, reallocate_above=float("inf"))
    fast = best_fixed(fixed, SAMPLES / 2)
    with quota_on(1, quota):
        dist.barrier()
        slow = best_fixed(fixed, SAMPLES * quota / (1.0 + quota))
        dist.barrier()
    run = make_run(stage, check_every=CHECK_EVERY)
    rows = []

    def train(phase: str, limit: float, best: tuple[float, int]) -> None:
        with quota_on(1, limit):
            dist.barrier()
            seconds = []
            for check in range(CHECKS):
                division = run.division
                seconds.append(fmean(run.iterate() for _ in range(CHECK_EVERY)))
                rows.append((f"{quota:g}", str(stage), phase, str(check), division, seconds[-1], seconds[-1] / best[0]))
            dist.barrier()
        late = fmean(seconds[3:])
        rows.append((f"{quota:g}", str(stage), phase, "3 and later", "", late, late / best[0]))
        division = f"{SAMPLES - best[1]} + {best[1]}"
        rows.append((f"{quota:g}", str(stage), phase, "best fixed", division, best[0], 1.0))

    train("before", 1.0, fast)
    train("slow", quota, slow)
    train("after", 1.0, fast)
    return rows


def main() -> None:
    arguments = read_options(__doc__, quotas=(0.5, 0.25), stages=(1,))
    start_ranks(2)
    rows = [row for stage in arguments.stages for quota in arguments.quotas for row in measure(quota, stage)]
    columns = ("quota", "stage", "rank 1", "check", "samples by rank", "iteration [s]", "of best fixed")
    title = (
        f"Rank 1 of 2 under a CPU quota for a while: ViT, {HIDDEN} wide, {DEPTH} deep, patch 4, {SAMPLES} samples per "
        f"iteration, check_every={CHECK_EVERY}"
    )
    notes = [
        "A row is the mean of the iterations between two checks, in the division at their start. *3 and later*: the "
        "mean from the third check after the change on. *Best fixed*: the fastest of the divisions tried."
    ]
    print_table(title, columns, rows, notes)


if __name__ == "__main__":
    main()
