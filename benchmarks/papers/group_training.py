"""Trains a ViT as a tensor-parallel group inside one process, whose ranks prune given shares of their products.

The layers' own code computes one shard after the other, so what is pruned, and what that costs in accuracy, is as on
so many devices. Finished runs are kept in a file and not repeated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.progress import Progress
from timm.models.vision_transformer import VisionTransformer

from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.config import BalanceConfig, Pruning
from colossal_hetero.common.files import write_json
from colossal_hetero.testing.in_process import shard_in_process
from examples.common.images import load_data
from examples.vit.options import parse_options

RANKS = 8
MODEL = {"embed_dim": 128, "num_heads": 4, "patch_size": 8, "img_size": 32, "num_classes": 10}
IMAGES, BATCH = 4096, 64
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.05
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


@dataclass(frozen=True)
class Trained:
    accuracy: tuple[float, ...]
    """Of held-out images after each epoch, in percent."""


def train_all(runs: Sequence[Run], data_dir: str) -> dict[Run, Trained]:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    left = [run for run in dict.fromkeys(runs) if run.key not in kept]
    with Progress() as progress, ProcessPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("training", total=len(left))
        futures = {pool.submit(train, run, data_dir): run for run in left}
        for future in as_completed(futures):
            kept[futures[future].key] = asdict(future.result())
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, KEPT)
            progress.advance(task)
    return {run: Trained(tuple(kept[run.key]["accuracy"])) for run in runs}


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


def train(run: Run, data_dir: str) -> Trained:
    torch.set_num_threads(1)
    options = parse_options(["--data", "folder", "--data-dir", data_dir, "--seed", str(run.seed)])
    images, held_out = load_data(options, track=lambda items, _: iter(items))
    model, appliers = make_group(run)
    iterations = IMAGES // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    total = iterations * len(run.ratios)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=total, pct_start=0.1)
    generator = torch.Generator().manual_seed(run.seed)
    accuracy = []
    for epoch, ratios in enumerate(run.ratios):
        images.set_epoch(epoch)
        model.train()
        for applier, ratio in zip(appliers, ratios, strict=True):
            applier.prune(ratio)
        for batch in torch.randperm(len(images), generator=generator)[:IMAGES].view(iterations, BATCH):
            x, y = images.__getitems__(batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            for applier in appliers:
                applier.end_iteration()
        accuracy.append(_accuracy(model, held_out))
    return Trained(tuple(accuracy))


def iteration_ratios(runs: Sequence[Run], rounds: int = 15) -> dict[Run, float]:
    """Seconds of both passes of each run's first epoch relative to the first run, in turns: the median ratio."""
    torch.set_num_threads(1)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    models = {}
    for run in runs:
        models[run], appliers = make_group(run)
        for applier, ratio in zip(appliers, run.ratios[0], strict=True):
            applier.prune(ratio)
    seconds: dict[Run, list[float]] = {run: [] for run in runs}
    for _ in range(rounds):
        for run, model in models.items():
            start = time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            seconds[run].append(time.perf_counter() - start)
    first = seconds[runs[0]][2:]
    return {run: median(a / b for a, b in zip(each[2:], first, strict=True)) for run, each in seconds.items()}


@torch.no_grad()
def _accuracy(model: VisionTransformer, held_out) -> float:
    model.eval()
    parts = (held_out.__getitems__(part) for part in torch.arange(len(held_out)).split(500))
    return 100.0 * sum(int((model(x).argmax(-1) == y).sum()) for x, y in parts) / len(held_out)
