"""A rank that becomes so slow that iterations are shorter without it, and recovers.

sudo python -m benchmarks.pipeline.idle_rank [--share 0.04] [--iterations 24]

Two ranks train a ViT as two replicas, each with 0.85 of a core. A CPU quota then leaves rank 1 a share of its speed,
which the program is not told; it is lifted later. Three runs take turns: one follows the speeds and leaves the rank
idle, one follows but keeps all ranks (as without a loader of ``prepare_dataloader``), one keeps its first plan. Beside
them, rank 0 trains the same global batches alone with torch, without any library.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from itertools import count

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common import Timed, make_vit, print_table, read_options, start_ranks, take_turns
from benchmarks.pipeline.live_plan import SHARE
from benchmarks.pipeline.trained import loss, make_batch, measure_layers

# isort: split
from colossalai.booster import Booster
from torch.utils.data import TensorDataset

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.testing.stragglers import cpu_quota

HIDDEN = 128
PERIOD_US = 40_000  # a quota is at least 1 ms long


class Run(Timed):
    """Two replicas, with a loader whose batches are divided as the plan says."""

    def __init__(self, name: str, arguments: argparse.Namespace, planning: PlanConfig) -> None:
        self.title, self.seconds = name, []
        self.plugin = HeteroHybridParallelPlugin(plan="auto", precision="fp32", planning=planning)
        self.booster = Booster(plugin=self.plugin)
        images, labels = make_batch(64 * arguments.global_batch)
        loader = self.plugin.prepare_dataloader(TensorDataset(images, labels))
        model = make_vit(HIDDEN, arguments.blocks)
        made = self.booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-4), loss, loader)
        self.model, self.optimizer, _, self.loader, _ = made
        self.batches = (batch for _ in count() for batch in self.loader)

    def iterate(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        self.booster.execute_pipeline(self.batches, self.model, loss, self.optimizer, return_loss=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start


class Alone(Timed):
    """The same global batches on rank 0, in micro-batches, with torch alone."""

    title = "rank 0 alone, torch"

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seconds: list[float] = []
        self._model = make_vit(HIDDEN, arguments.blocks)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        images, labels = make_batch(arguments.global_batch)
        size = arguments.micro_batch
        self._batches = list(zip(images.split(size), labels.split(size), strict=True))

    def iterate(self) -> float:
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            for images, labels in self._batches:
                (F.cross_entropy(self._model(images), labels) / len(self._batches)).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - start


def main() -> None:
    arguments = read_options(__doc__, share=0.04, blocks=8, micro_batch=4, global_batch=32, iterations=24, rounds=3)
    start_ranks(2)
    with ExitStack() as stack:
        measure(arguments, stack)


def measure(arguments: argparse.Namespace, stack: ExitStack) -> None:
    quota, rank = stack.enter_context(ExitStack()), dist.get_rank()

    def limit(share: float) -> None:
        quota.close()
        quota.enter_context(cpu_quota(SHARE / 2 * share, PERIOD_US))

    limit(1.0)
    profile = measure_layers(make_vit(HIDDEN, arguments.blocks), arguments.micro_batch)
    topology = probe_ranks(torch.device("cpu"))[0]
    planning = dict(cluster=topology, profile=profile, global_batch_size=arguments.global_batch, layer_sums=True)
    follows = Run("may leave it idle", arguments, PlanConfig(**planning))
    keeps = Run("follows, keeps it", arguments, PlanConfig(**planning))
    still = Run("first plan", arguments, PlanConfig(**planning, follow_speed=False))
    runs = [follows, keeps, still, Alone(arguments)]
    keeps.plugin._live._why_not_idle = lambda *_: "This run keeps all ranks"  # type: ignore[union-attr, method-assign]
    rows = []
    for share in (1.0, arguments.share, 1.0):
        limit(share if rank == 1 else 1.0)
        before = len(follows.plugin.plan_changes)
        changed = None
        # An idle rank looks every 50 steps for what its device computes.
        for iteration in range(arguments.iterations + (60 if rows else 0)):
            follows.iterate()
            if iteration < arguments.iterations:
                keeps.iterate()
            if changed is None and len(follows.plugin.plan_changes) > before:
                changed = iteration
                if share == 1.0:
                    break
        for run in runs:
            run.seconds = []
        take_turns(runs, 0, arguments.rounds, 3)
        changes = follows.plugin.plan_changes[before:]
        moves = " ".join(f"{change.seconds:.2f}" for change in changes) or "–"
        rows.append((f"{share:g}", "–" if changed is None else changed, moves, *(run.median_seconds for run in runs)))
    columns = ("rank 1's share", "changed after", "moves (s)", *(f"{run.title} (s)" for run in runs))
    print_table("Time of an iteration, two replicas, one becomes slow", columns, rows)


if __name__ == "__main__":
    main()
