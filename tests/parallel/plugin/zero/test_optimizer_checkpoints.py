"""A checkpoint continues the training as if it had not been interrupted, or is refused at another ZeRO stage.

The reference is one process that trains on the same global batches without an interruption.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from colossal_hetero.profiling.preserved_state import inner_optimizer
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import Numbered, assert_trained, boosted, fit, flat, global_batches, unmeasured

GLOBAL_BATCH = 8
STEPS_BEFORE = 2
"""Of the second epoch, before a checkpoint is saved."""
DIVISIONS = {2: [[3, 2], [1, 2]], 3: [[2, 1], [1, 0], [3, 1]]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(13), nn.Linear(13, 13)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Tower(nn.Module):
    """Blocks between layers of the model itself, some with equal shapes: if a checkpoint's parameters are taken in
    another order, the shapes alone do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mix = nn.Linear(13, 13)
        self.last = nn.Linear(13, 3)

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


def make_tower(parts: str) -> Tower:
    torch.manual_seed(3)
    model = Tower()
    if parts == "groups":
        for value in model.first.parameters():
            value.requires_grad = False
    return model


def make_tower_optimizer(model: nn.Module, kind: str, parts: str) -> torch.optim.Optimizer:
    """With ``parts="groups"``, two groups, and frozen parameters that are not left out."""
    values = list(model.parameters())
    groups: Any = values
    if parts == "groups":
        matrices, rest = [v for v in values if v.ndim > 1], [v for v in values if v.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    # A large eps, because a division by numbers near 0 amplifies the rounding errors of another order of sums.
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.05, eps=1e-3)


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


class Run:
    """A model that was boosted in one layout."""

    def __init__(self, layout: str, kind: str, parts: str, folder: Path, **more: Any) -> None:
        stage, options = LAYOUTS[layout]
        model, ranks = make_tower(parts), torch.distributed.get_world_size()
        profile = folder / f"profile {layout} {parts} {ranks}.json"  # so that each is measured once
        _, self.booster, self.model, self.optimizer, _, self.loader, self.schedule = boosted(
            *(stage, model, make_tower_optimizer(model, kind, parts)),
            division=DIVISIONS[ranks],
            schedule=make_schedule,
            max_micro_batch=8,
            profile=profile,
            **options,
            **more,
        )

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

    def paths(self, folder: Path, sharded: bool) -> tuple[str, str]:
        suffix = "" if sharded else ".pt"
        return str(folder / f"model{suffix}"), str(folder / f"optimizer{suffix}")

    def save(self, folder: Path, sharded: bool) -> None:
        folder.mkdir(exist_ok=True)
        model, optimizer = self.paths(folder, sharded)
        self.booster.save_model(self.model, model, shard=sharded)
        self.booster.save_optimizer(self.optimizer, optimizer, shard=sharded)
        self.booster.save_lr_scheduler(self.schedule, str(folder / "schedule.pt"))
        if torch.distributed.get_rank() == 0:
            torch.save(self.loader.state_dict(), folder / "loader.pt")
        torch.distributed.barrier()

    def load(self, folder: Path, sharded: bool) -> None:
        model, optimizer = self.paths(folder, sharded)
        self.booster.load_model(self.model, model)
        self.booster.load_optimizer(self.optimizer, optimizer)
        self.booster.load_lr_scheduler(self.schedule, str(folder / "schedule.pt"))
        self.loader.load_state_dict(torch.load(folder / "loader.pt"))

    def spoil(self) -> None:
        """Change all weights, states and options, so that what is not loaded shows."""
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = 7.0, 3.0
                for value in group["params"]:
                    value.add_(1.0)
            for state in inner_optimizer(self.optimizer).state.values():
                for entry in state.values():
                    if isinstance(entry, torch.Tensor):
                        entry.add_(5.0)


def can_load(source: str, target: str, parts: str) -> bool:
    """True if parameters have the same numbers; frozen ones have none at stages 1 and 2."""
    stages = LAYOUTS[source][0], LAYOUTS[target][0]
    return stages[0] == stages[1] or (3 not in stages and (parts == "one group" or 0 not in stages))


@unmeasured
def exchange(kind: str, parts: str, folder: str) -> dict[tuple[str, str, bool], torch.Tensor]:
    """Save in each layout in the middle of the second epoch, and finish it from each checkpoint that can be loaded.

    Returns the parameters by the layout of saving, that of loading, and whether checkpoints were sharded.
    """
    place = Path(folder)
    runs = {layout: Run(layout, kind, parts, place) for layout in LAYOUTS}
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
                if not can_load(source, target, parts):
                    stage, _ = LAYOUTS[source]
                    with pytest.raises(RuntimeError, match=f"ZeRO stage {stage}.*; use stage={stage}, the model"):
                        run.load(place / source, sharded)
                    continue
                run.load(place / source, sharded)
                run.train(1)
                found[source, target, sharded] = flat(run.model)
    return found


@unmeasured
def resume(kind: str, parts: str, folder: str) -> dict[tuple[str, str, bool], torch.Tensor]:
    """As :func:`exchange`, of one checkpoint for each layout that other ranks have saved."""
    found = {}
    for layout in LAYOUTS:
        run = Run(layout, kind, parts, Path(folder))
        run.load(Path(folder) / layout, True)
        run.train(1)
        found[layout, layout, True] = flat(run.model)
    return found


def train_alone(kind: str, parts: str) -> torch.Tensor:
    """The parameters of one process after two epochs."""
    model = make_tower(parts)
    optimizer = make_tower_optimizer(model, kind, parts)
    return fit(model, optimizer, global_batches(Numbered(), GLOBAL_BATCH) * 2, schedule=make_schedule(optimizer))


KINDS_AND_PARTS = [("adamw", "groups")]
if IS_THOROUGH:
    KINDS_AND_PARTS += [("sgd", "one group"), ("adamw", "one group"), ("sgd", "groups")]


@pytest.mark.parametrize("kind, parts", KINDS_AND_PARTS)
def test_training_continues_at_the_same_stage_and_on_more_ranks(kind: str, parts: str, tmp_path: Path) -> None:
    expected = train_alone(kind, parts)
    loads = sum(can_load(source, target, parts) for source in LAYOUTS for target in LAYOUTS)
    for ranks, function, count in ((2, exchange, loads * (2 if IS_THOROUGH else 1)), (3, resume, len(LAYOUTS))):
        for found in run_ranks(ranks, function, kind, parts, str(tmp_path), timeout_seconds=400):
            assert len(found) == count
            assert_trained([list(found.values())], [f"{case}, {ranks} ranks" for case in found], expected, atol=1e-5)


def state_tensors(run: Run) -> list[torch.Tensor]:
    inner = inner_optimizer(run.optimizer)
    states = [inner.state[value] for group in inner.param_groups for value in group["params"]]
    return [state[key] for state in states for key in sorted(state) if isinstance(state[key], torch.Tensor)]


@unmeasured
def load_in_nested_wrappers(folder: str) -> None:
    """In fp16 and at stage 0, one wrapper is in another one."""
    place = Path(folder)
    run = Run("stage 0", "adamw", "one group", place, precision="fp16")
    run.train(0)
    before = [value.clone() for value in (*state_tensors(run), flat(run.model))]
    for sharded in (False, True):
        run.save(place / str(sharded), sharded)
        run.spoil()
        run.load(place / str(sharded), sharded)
        for value, wanted in zip((*state_tensors(run), flat(run.model)), before, strict=True):
            assert torch.equal(value, wanted)


def test_a_checkpoint_of_nested_wrappers_is_loaded(tmp_path: Path) -> None:
    run_ranks(2, load_in_nested_wrappers, str(tmp_path))


@unmeasured
def load_what_is_no_checkpoint(folder: str) -> None:
    place = Path(folder)
    run = Run("stage 0", "sgd", "one group", place)
    run.save(place, sharded=True)
    for path, words in (
        ("none", "no such file"),
        (".", "has no index file"),
        ("model", "no file of parameter groups"),
        ("other.pt", "is not a checkpoint of an optimizer"),
    ):
        if torch.distributed.get_rank() == 0:
            torch.save({"first.weight": torch.zeros(2)}, place / "other.pt")
        torch.distributed.barrier()
        with pytest.raises(RuntimeError, match=words):
            run.booster.load_optimizer(run.optimizer, str(place / path))
    with pytest.raises(ValueError, match="is not one that booster"):
        run.booster.load_optimizer(
            OptimizerWrapper(torch.optim.SGD(make_tower("one group").parameters(), lr=0.1)), str(place / "optimizer")
        )


def test_what_is_no_checkpoint_of_an_optimizer_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, load_what_is_no_checkpoint, str(tmp_path))
