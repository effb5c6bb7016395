"""Batches that are divided again when a CPU quota is put on rank 1 and taken off in training, check by check.

sudo python -m benchmarks.data_parallel.redivision [--quotas 0.5 0.25] [--stages 1] [--plugin zero]

Needs Linux, and write access to cgroups (version 1 or 2). The plugin measures both ranks without a quota, and trains
with ``check_every``. Then the quota comes, and goes again. The program does not know of it. The control is the best
fixed division: divisions around the one that the quota suggests are trained with one after the other, under the
quota and without it, and the fastest counts. Aim: at most 1.03 times its iteration time from the third check after a
change on, and no division that passes the best one by more than 5 %. With ``--plugin hybrid``, global batches are
divided between two replicas of ``HeteroHybridParallelPlugin``. With ``--data-seconds``, loading a sample takes so long
on rank 1 instead of a quota.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from benchmarks.common import print_table, start_ranks
from benchmarks.tensor_parallel.uneven import Turns, digits, make_model
from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin, HeteroZeroPlugin
from colossal_hetero.testing.stragglers import cpu_quota

SHARES = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
"""Divisions that are tried for the control: samples of rank 1 relative to those that the quota suggests."""


class SlowSamples(Dataset):
    """Samples that take a while to load on rank 1, while :attr:`seconds` is above 0."""

    def __init__(self) -> None:
        self._data = digits()
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if self.seconds > 0.0 and dist.get_rank() == 1:
            time.sleep(self.seconds)
        return self._data[index]


class Run(Turns):
    """A model in training, whose division may be set by hand."""

    def divide(self, samples: Sequence[int]) -> None:
        """Use a fixed division from the next global batch on."""
        loader = self._loader
        loader.divide_by(lambda whole: [[count] for count in samples], loader.global_sampler.drawn_global_batch)

    def mean_seconds(self, iterations: int) -> float:
        """Mean time of an iteration, the same on all ranks."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(iterations):
            self.iterate()
        dist.barrier()
        return (time.perf_counter() - start) / iterations


def make_run(arguments: argparse.Namespace, stage: int, data: Dataset, **settings: Any) -> Run:
    if arguments.plugin == "zero":
        plugin: Any = HeteroZeroPlugin(stage, batches=BatchConfig(global_batch_size=arguments.batch, **settings))
    else:
        plugin = HeteroHybridParallelPlugin(
            1, 1, zero_stage=stage, precision="fp32" if stage == 0 else "bf16",
            batches=BatchConfig(global_batch_size=arguments.batch, **settings),
        )  # fmt: skip
    model = make_model(arguments.hidden, arguments.depth, arguments.patch)
    return Run(arguments.plugin, plugin, model, data, None)


@contextmanager
def slowed(quota: float, data: SlowSamples, arguments: argparse.Namespace) -> Iterator[None]:
    """Rank 1 is slow in the block."""
    with ExitStack() as stack:
        if arguments.data_seconds > 0.0:
            data.seconds = arguments.data_seconds
            stack.callback(setattr, data, "seconds", 0.0)
        elif dist.get_rank() == 1:
            stack.enter_context(cpu_quota(quota, arguments.period_us))
        dist.barrier()
        yield
        dist.barrier()


def best_fixed(run: Run, suggested: float, arguments: argparse.Namespace) -> tuple[float, int]:
    """Seconds of an iteration in the fastest fixed division, and the samples of rank 1 in it."""
    counts = sorted({min(max(round(share * suggested), 1), arguments.batch - 1) for share in SHARES})
    found = []
    for count in counts:
        run.divide([arguments.batch - count, count])
        run.mean_seconds(3)
        found.append((run.mean_seconds(arguments.fixed_iterations), count))
    best = [min(found)]
    dist.broadcast_object_list(best)
    return best[0]


def measure(quota: float, stage: int, arguments: argparse.Namespace) -> list[tuple]:
    data, every = SlowSamples(), arguments.check_every
    fixed = make_run(arguments, stage, data, reallocate_above=float("inf"))
    fast, fast_count = best_fixed(fixed, arguments.batch / 2, arguments)
    with slowed(quota, data, arguments):
        speed = quota
        if arguments.data_seconds > 0.0:
            computing = fast * 2 / arguments.batch
            speed = computing / (computing + arguments.data_seconds)
        slow, slow_count = best_fixed(fixed, arguments.batch * speed / (1.0 + speed), arguments)
    run = make_run(arguments, stage, data, check_every=every)
    rows = []

    def train(phase: str, best: float, best_count: int) -> None:
        for check in range(arguments.checks):
            division = run.division
            seconds = run.mean_seconds(every)
            rows.append((f"{quota:g}", str(stage), phase, str(check), division, seconds, seconds / best))
        late = fmean(row[5] for row in rows[-arguments.checks + 3 :])
        rows.append((f"{quota:g}", str(stage), phase, "3 and later", "", late, late / best))
        best_division = f"{arguments.batch - best_count} + {best_count}"
        rows.append((f"{quota:g}", str(stage), phase, "best fixed", best_division, best, 1.0))

    train("before", fast, fast_count)
    with slowed(quota, data, arguments):
        train("slow", slow, slow_count)
    train("after", fast, fast_count)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=float, nargs="+", default=[0.5, 0.25], help="share of a core that rank 1 gets")
    parser.add_argument("--data-seconds", type=float, default=0.0, help="seconds to load a sample on rank 1, no quota")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[1], help="stages of ZeRO")
    parser.add_argument("--plugin", choices=("zero", "hybrid"), default="zero")
    parser.add_argument("--check-every", type=int, default=5, help="global batches between two checks")
    parser.add_argument("--checks", type=int, default=8, help="checks in each phase")
    parser.add_argument("--fixed-iterations", type=int, default=8, help="iterations of each division for the control")
    parser.add_argument("--batch", type=int, default=192, help="samples per iteration, over both ranks")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--period-us", type=int, default=100_000, help="period of the quota")
    arguments = parser.parse_args()
    start_ranks(2)
    quotas = [1.0] if arguments.data_seconds > 0.0 else arguments.quotas
    rows = [row for stage in arguments.stages for quota in quotas for row in measure(quota, stage, arguments)]
    columns = ("quota", "stage", "rank 1", "check", "samples by rank", "iteration [s]", "of best fixed")
    how = f"{arguments.data_seconds:g} s to load a sample" if arguments.data_seconds > 0.0 else "a CPU quota"
    title = (
        f"Rank 1 of 2 slow for a while ({how}), {arguments.plugin} plugin: ViT, {arguments.hidden} wide, "
        f"{arguments.depth} deep, patch {arguments.patch}, {arguments.batch} samples per iteration, "
        f"check_every={arguments.check_every}"
    )
    notes = [
        "A row is the mean of the iterations between two checks, in the division at their start. *3 and later*: the "
        "mean from the third check after the change on. *Best fixed*: the fastest of the divisions tried."
    ]
    print_table(title, columns, rows, notes)


if __name__ == "__main__":
    main()
