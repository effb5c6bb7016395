"""A checkpoint continues the training as if it had not been interrupted, or is refused at another ZeRO stage.

The reference is one process that trains on the same global batches without an interruption.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from colossal_hetero.profiling.preserved_state import inner_optimizer
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.checks import on
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import Numbered, assert_trained, boosted, fit, flat, global_batches, unmeasured

STEPS_BEFORE = 2  # of the second epoch, before a checkpoint is saved
DIVISIONS = {2: [[3, 2], [1, 2]], 3: [[2, 1], [1, 0], [3, 1]]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(13), nn.Linear(13, 13)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Tower(nn.Module):
    """Blocks between layers of the model itself, some with equal shapes: if a checkpoint's parameters are taken in
    another order, the shapes alone do not show it. The first layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 13).requires_grad_(False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mix, self.last = nn.Linear(13, 13), nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs[:, :7])
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(torch.tanh(self.mix(hidden)))


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    # Files of stage 2 are those of stage 1.
    **{f"stage {stage}": (stage, {}) for stage in ((0, 1, 2, 3) if IS_THOROUGH else (0, 1, 3))},
    "stage 3 in blocks": (3, {"auto_wrap_policy": ModuleWrapPolicy({Block})}),
}
"""By name: stage, and options of the plugin."""


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = ([v for v in model.parameters() if (v.ndim > 1) == wanted] for wanted in (True, False))
    groups: Any = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    # A large eps, because a division by numbers near 0 amplifies the rounding errors of another order of sums.
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05, eps=1e-3)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Run:
    def __init__(self, layout: str, **more: Any) -> None:
        (stage, options), model = LAYOUTS[layout], Tower()
        fixed = dict(division=DIVISIONS[dist.get_world_size()], schedule=make_schedule, max_micro_batch=8)
        run = boosted(stage, model, make_optimizer(model), **fixed, **options, **more)
        _, self.booster, self.model, self.optimizer, _, self.loader, self.schedule = run

    def train(self, epoch: int, steps: int | None = None) -> None:
        """``steps`` optimizer steps of an epoch, or all that are left of it."""
        self.loader.set_epoch(epoch)
        fit(self.model, self.optimizer, self.batches(steps), schedule=self.schedule)

    def batches(self, steps: int | None) -> Iterator[Any]:
        done = 0
        for batch in self.loader:
            yield batch
            done += self.loader.current.is_last
            if done == steps:
                return

    def save(self, folder: Path, sharded: bool) -> None:
        save_checkpoint(self, folder, sharded)
        self.booster.save_lr_scheduler(self.schedule, str(folder / "schedule.pt"))
        if dist.get_rank() == 0:
            torch.save(self.loader.state_dict(), folder / "loader.pt")
        dist.barrier()

    def load(self, folder: Path, sharded: bool) -> None:
        load_checkpoint(self, folder, sharded)
        self.booster.load_lr_scheduler(self.schedule, str(folder / "schedule.pt"))
        self.loader.load_state_dict(torch.load(folder / "loader.pt"))

    def states(self) -> list[torch.Tensor]:
        inner = inner_optimizer(self.optimizer)
        found = [inner.state[value] for group in inner.param_groups for value in group["params"]]
        return [each[key] for each in found for key in sorted(each) if isinstance(each[key], torch.Tensor)]

    def spoil(self) -> None:
        """Change all weights, states and options, so that what is not loaded shows."""
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = 7.0, 3.0
                for value in group["params"]:
                    value.add_(1.0)
            for entry in self.states():
                entry.add_(5.0)


def can_load(source: str, target: str) -> bool:
    """True if parameters have the same numbers: at stage 0 frozen ones have some, and at stage 3 names count."""
    stages = LAYOUTS[source][0], LAYOUTS[target][0]
    return stages[0] == stages[1] or set(stages) == {1, 2}


@unmeasured
def exchange(place: Path) -> dict[str, torch.Tensor]:
    runs = {layout: Run(layout) for layout in LAYOUTS}
    for layout, run in runs.items():
        run.train(0)
        run.train(1, STEPS_BEFORE)
        for sharded in (False, True):
            run.save(place / layout, sharded)
    found = {}
    for number, (target, run) in enumerate(runs.items()):
        for other, source in enumerate(LAYOUTS):
            for sharded in (False, True) if IS_THOROUGH else ((number + other) % 2 == 1,):
                run.spoil()
                if not can_load(source, target):
                    stage, _ = LAYOUTS[source]
                    with pytest.raises(RuntimeError, match=f"ZeRO stage {stage}.*; use stage={stage}, the model"):
                        run.load(place / source, sharded)
                    continue
                run.load(place / source, sharded)
                run.train(1)
                found[f"{source}, {target}, {sharded}"] = flat(run.model)
    return found


@unmeasured
def resume(place: Path) -> dict[str, torch.Tensor]:
    found = {}
    for layout in LAYOUTS:
        run = Run(layout)
        run.load(place / layout, True)
        run.train(1)
        found[layout] = flat(run.model)
    return found


def test_training_continues_at_the_same_stage_and_on_more_ranks(tmp_path: Path) -> None:
    model = Tower()
    optimizer = make_optimizer(model)
    expected = fit(model, optimizer, global_batches(Numbered(), 8) * 2, schedule=make_schedule(optimizer))
    for ranks, function in ((2, exchange), (3, resume)):
        for found in run_ranks(ranks, function, tmp_path, timeout_seconds=280):
            assert len(found) >= len(LAYOUTS)
            assert_trained([list(found.values())], [f"{case}, {ranks} ranks" for case in found], expected, atol=1e-5)


@on(2)
@unmeasured
def nested_wrappers_are_loaded_and_what_is_no_checkpoint_is_refused(folder: Path) -> None:
    """In fp16 and at stage 0, a wrapper is in another one."""
    run = Run("stage 0", precision="fp16")
    run.train(0)
    before = [value.clone() for value in (*run.states(), flat(run.model))]
    for sharded in (False, True):
        run.save(folder, sharded)
        run.spoil()
        run.load(folder, sharded)
        for value, wanted in zip((*run.states(), flat(run.model)), before, strict=True):
            assert torch.equal(value, wanted)
    if dist.get_rank() == 0:
        torch.save({"first.weight": torch.zeros(2)}, folder / "other.pt")
    dist.barrier()
    for path, words in (
        ("none", "no such file"),
        (".", "has no index file"),
        ("model", "no file of parameter groups"),
        ("other.pt", "is not a checkpoint of an optimizer"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run.booster.load_optimizer(run.optimizer, str(folder / path))
    unboosted = OptimizerWrapper(torch.optim.SGD(Tower().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="is not one that booster"):
        run.booster.load_optimizer(unboosted, str(folder / "optimizer"))
