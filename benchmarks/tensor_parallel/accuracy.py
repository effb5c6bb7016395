"""Loss of accuracy by resizing: priority rules and imputations with γ = ½ on one rank, relative to an unpruned control.

python -m benchmarks.tensor_parallel.accuracy --data-dir DIR [--jobs 2] [--epochs 5] [--seeds 3]

DIR holds images as train/CLASS/* and test/CLASS/*. A ViT is trained from scratch by tensor-parallel groups of 2 and of
4 ranks, each group inside one process. The last rank prunes half of its work in every iteration: half of the columns of
all its layers (the same layer code, one shard after the other), or half of the units of all its blocks (the model with
these units set to zero, which has the same gradients). Finished runs are kept in runs/accuracy.json and not repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmarks.common import print_table, read_options
from benchmarks.in_process import BATCH, accuracies, read_images, shard_in_process, train_all
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.config import BalanceConfig, Pruning
from colossal_hetero.balance.pruning import ColumnSelector, make_selector

MODEL = {"embed_dim": 128, "depth": 6, "num_heads": 4, "patch_size": 8, "img_size": 32, "num_classes": 10}
Matrices = tuple[Tensor, Tensor]

RATIO = 0.5


class Run(NamedTuple):
    """One training run."""

    ranks: int
    form: str
    """What is pruned: ``column`` or ``block``, as in ``BalanceConfig.resizing``."""
    rule: str
    imputation: str
    seed: int
    epochs: int

    @property
    def key(self) -> str:
        return (
            f"{self.ranks} ranks, {self.form}, {self.rule}, {self.imputation}, seed {self.seed}, {self.epochs} epochs"
        )


def make_runs(epochs: int, seeds: int) -> list[Run]:
    """The control, every rule with zero imputation, the other imputations with one rule, and blocks."""
    variants = [("column", "none", "zero")]
    variants += [("column", rule, "zero") for rule in ("random", "priority", "priority-diff", "norm-product")]
    variants += [("column", "norm-product", imputation) for imputation in ("average", "same")]
    variants += [("block", rule, "zero") for rule in ("random", "priority", "norm-product")]
    runs = []
    for seed in range(seeds):
        for ranks in (2, 4):
            # Without pruning, the number of ranks has no effect, so the control runs once.
            runs += [Run(ranks, *variant, seed, epochs) for variant in variants if variant[1] != "none" or ranks == 2]
    return runs


class PrunedUnits:
    """Prunes half of the units of the last rank's blocks in a model that is not sharded.

    A pruned unit is set to zero before the block's second layer, so it adds nothing to the output, and its weights get
    no gradient. ``tests/parallel/layers/test_training_loops.py`` shows that a resized block trains like this.
    """

    def __init__(self, model: VisionTransformer, run: Run, interval: int) -> None:
        self._interval, self._iterations = interval, 0
        self._blocks: list[tuple[Callable[[], Matrices], ColumnSelector, Tensor]] = []
        seeds = count(run.seed)
        for block in model.blocks:
            for first, second, units in (
                (block.attn.qkv, block.attn.proj, block.attn.num_heads),
                (block.mlp.fc1, block.mlp.fc2, block.mlp.fc2.in_features),
            ):
                matrices = partial(_matrices, first, second, units, units // run.ranks)
                kept = torch.ones(units, dtype=torch.bool)
                selector = make_selector(run.rule, matrices()[1], next(seeds))
                self._blocks.append((matrices, selector, kept))
                second.register_forward_pre_hook(partial(_prune, kept))
        self._choose()

    def end_iteration(self) -> None:
        self._iterations += 1
        if self._iterations % self._interval == 0:
            for matrices, selector, _ in self._blocks:
                selector.end_interval(matrices()[1])
        self._choose()

    def _choose(self) -> None:
        for matrices, selector, kept in self._blocks:
            x, weight = matrices()
            units = weight.shape[1]
            of_last = kept[-units:]
            of_last.zero_()
            of_last[selector(x, weight, units - round(RATIO * units))] = True


def _matrices(first: nn.Linear, second: nn.Linear, units: int, last: int) -> Matrices:
    """As ``Block.matrices``, of the ``last`` units."""
    rows = first.weight.detach().unflatten(0, (-1, units, second.in_features // units))[:, -last:]
    columns = second.weight.detach().unflatten(1, (units, -1))[:, -last:]
    return columns.movedim(1, -1).reshape(-1, last), rows.movedim(1, -1).reshape(-1, last)


def _prune(kept: Tensor, second: nn.Module, inputs: tuple[Tensor]) -> Tensor | None:
    (x,) = inputs
    if not second.training:
        return None
    return (x.unflatten(-1, (len(kept), -1)) * kept[:, None]).flatten(-2)


def train(run: Run, data_dir: str) -> list[float]:
    torch.manual_seed(run.seed)
    model = VisionTransformer(**MODEL)
    data = read_images(data_dir, run.seed)
    iterations = len(data[0]) // BATCH
    resizer: Applier | PrunedUnits | None = None
    if run.form == "block":
        resizer = PrunedUnits(model, run, iterations)
    else:
        shards = shard_in_process(model, run.ranks)
        if run.rule != "none":
            rules = Pruning(resizing="column", seed=run.seed, priority=run.rule, imputation=run.imputation)
            resizer = Applier(shards[-1], [], BalanceConfig(mode="resize", pruning=rules), iterations)
            resizer.prune(RATIO)
    end_iteration = resizer.end_iteration if resizer is not None else lambda: None
    return accuracies(model, data, run.seed, run.epochs, end_iteration=end_iteration)


def tabulate(results: dict[str, list[float]], epochs: int, seeds: int) -> None:
    """Mean and standard deviation over the seeds of the last epoch's accuracy, and the loss relative to the control."""
    groups: dict[tuple, list[float]] = {}
    for run in make_runs(epochs, seeds):
        for ranks in (2, 4) if run.rule == "none" else (run.ranks,):
            groups.setdefault((ranks, run.form, run.rule, run.imputation), []).append(results[run.key][-1])
    rows = []
    for (ranks, form, rule, imputation), values in sorted(groups.items(), key=lambda item: item[0][0]):
        control = groups.get((ranks, "column", "none", "zero"), [float("nan")])
        spread = stdev(values) if len(values) > 1 else float("nan")
        name = "control, nothing pruned" if rule == "none" else f"{form}s by {rule}"
        loss = mean(control) - mean(values)
        rows.append((ranks, name, imputation, f"{mean(values):.1f} ± {spread:.1f}", f"{loss:.1f}", len(values)))
    title = f"Held-out accuracy [%] after {epochs} epochs; γ = {RATIO} on one rank in all iterations"
    print_table(title, ("ranks", "pruned", "imputation", "accuracy", "loss", "seeds"), rows)


def main() -> None:
    arguments = read_options(__doc__, data_dir="data/cifar10", jobs=os.cpu_count() or 1, epochs=5, seeds=3)
    runs = {run.key: run for run in make_runs(arguments.epochs, arguments.seeds)}
    results = train_all(runs, train, arguments.data_dir, Path("runs/accuracy.json"), arguments.jobs)
    tabulate(results, arguments.epochs, arguments.seeds)


if __name__ == "__main__":
    main()
