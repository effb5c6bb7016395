"""Trains a ViT as a tensor-parallel group inside one process, whose ranks prune given shares of their products.

The layers' own code computes one shard after the other, so what is pruned, and what that costs in accuracy, is as on
so many devices. Finished runs are kept in a file and not repeated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from benchmarks import in_process
from benchmarks.common import medians_in_turns
from benchmarks.in_process import BATCH, shard_in_process
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.config import BalanceConfig, Pruning

RANKS = 8
MODEL = {"embed_dim": 128, "num_heads": 4, "patch_size": 8, "img_size": 32, "num_classes": 10}
IMAGES = 4096
"""Of an epoch."""
KEPT = Path("runs/papers/training.json")


@dataclass(frozen=True)
class Run:
    ratios: tuple[tuple[float, ...], ...]
    """γ by epoch and rank."""
    priority: str = "random"
    imputation: str = "zero"
    seed: int = 0
    depth: int = 3

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))


def steady(ratios: Sequence[float], epochs: int) -> tuple[tuple[float, ...], ...]:
    """The same share of each rank in every epoch."""
    return (tuple(ratios),) * epochs


def round_robin(ratio: float, epochs: int) -> tuple[tuple[float, ...], ...]:
    """In every epoch another rank prunes."""
    return tuple(tuple(ratio if epoch % RANKS == rank else 0.0 for rank in range(RANKS)) for epoch in range(epochs))


def train_all(runs: Sequence[Run], data_dir: str) -> dict[Run, list[float]]:
    """The accuracy of held-out images after each epoch of each run, in percent."""
    found = in_process.train_all({run.key: run for run in runs}, train, data_dir, KEPT, os.cpu_count())
    return {run: found[run.key] for run in runs}


def make_group(run: Run) -> tuple[VisionTransformer, list[Applier]]:
    """The model, and what each rank prunes."""
    torch.manual_seed(run.seed)
    model = VisionTransformer(**MODEL, depth=run.depth)
    config = BalanceConfig(
        mode="resize",
        max_resize=0.95,
        pruning=Pruning(
            resizing="column",
            seed=run.seed,
            priority=run.priority,
            imputation=run.imputation,
            **({"ratio_form": "printed"} if run.priority == "priority-diff" else {}),
        ),
    )
    return model, [Applier(shards, [], config, IMAGES // BATCH) for shards in shard_in_process(model, RANKS)]


def train(run: Run, data_dir: str) -> list[float]:
    model, appliers = make_group(run)

    def begin_epoch(epoch: int) -> None:
        for applier, ratio in zip(appliers, run.ratios[epoch], strict=True):
            applier.prune(ratio)

    def end_iteration() -> None:
        for applier in appliers:
            applier.end_iteration()

    hooks = dict(begin_epoch=begin_epoch, end_iteration=end_iteration)
    return in_process.accuracies(
        model, in_process.read_images(data_dir, run.seed), run.seed, len(run.ratios), most_images=IMAGES, **hooks
    )


def iteration_ratios(runs: Sequence[Run], rounds: int = 13) -> dict[Run, float]:
    """Median seconds of both passes of each run's first epoch, in turns, relative to the first run's."""
    torch.set_num_threads(1)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def timed(run: Run) -> Callable[[], float]:
        model, appliers = make_group(run)
        for applier, ratio in zip(appliers, run.ratios[0], strict=True):
            applier.prune(ratio)

        def seconds() -> float:
            start = time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            return time.perf_counter() - start

        return seconds

    found = medians_in_turns({run: timed(run) for run in runs}, rounds, warmup=2)
    return {run: seconds / found[runs[0]] for run, seconds in found.items()}
