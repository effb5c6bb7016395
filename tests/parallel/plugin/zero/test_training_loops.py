"""Training loops that differ from the usual one train as one process does on the same batches, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import zero_plugin
from tests.support.zero_runs import Numbered, assert_trained, flat, make_model, sizes_by_rank, unmeasured

GLOBAL_BATCH = 8
EPOCHS = 2
RATE = 0.1
CLIP_VALUE = 0.02
"""Below many elements of the gradients."""

WHOLE = {2: [[7], [1]], 3: [[5], [0], [3]]}
"""By number of ranks: a division in which every rank has one micro-batch."""
PARTS = {2: [[4, 1], [1, 2]], 3: [[2, 2], [1, 0], [2, 1]]}
"""By number of ranks: a division in which every rank has two micro-batches."""


class Script:
    """What a training script has after ``booster.boost``, and the samples that it trains with."""

    def __init__(self, stage: int, division: list[list[int]], folder: str, **options: Any) -> None:
        ranks = torch.distributed.get_world_size()
        self.plugin = zero_plugin(
            stage, GLOBAL_BATCH, max_micro_batch=8, profile=f"{folder}/{stage}-{ranks}.json", **options
        )
        self.booster = Booster(plugin=self.plugin)
        loader = self.plugin.prepare_dataloader(Numbered(), shuffle=True, seed=11, drop_last=True)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.model, self.optimizer, self.criterion, self.loader, _ = self.booster.boost(
            model, optimizer, nn.CrossEntropyLoss(), loader
        )
        self.loader.divide_by(lambda samples: sizes_by_rank(division, samples))
        self.batches: list[list[int]] = []
        self.means: list[float] = []

    def epochs(self) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        for epoch in range(EPOCHS):
            self.loader.set_epoch(epoch)
            yield self._batches(epoch)

    def all_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batches in self.epochs():
            yield from batches

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.criterion(self.model(batch[0]), batch[1])

    def train_with(self, batch: tuple[Tensor, Tensor]) -> None:
        """The usual iteration."""
        loss = self.loss(batch)
        self.booster.backward(loss, self.optimizer)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in self.loader:
            drawn = self.loader._drawn
            ids = inputs[:, 7].long().tolist() if drawn.samples else []
            self.batches.append([epoch, drawn.global_batch, *ids])
            yield inputs, targets


Loop = Callable[[Script], None]


def usual(script: Script) -> None:
    for batch in script.all_batches():
        script.train_with(batch)


def prefetched(script: Script) -> None:
    """Take one batch ahead, and copy and change it, as the prefetchers of NVIDIA and timm do."""
    for batches in script.epochs():
        following = None
        for inputs, targets in batches:
            following, batch = (inputs.clone().mul_(1.0).to(torch.float32), targets.clone()), following
            if batch is not None:
                script.train_with(batch)
        script.train_with(following)


def accumulated(script: Script) -> None:
    """Step after every third batch."""
    for number, batch in enumerate(script.all_batches(), 1):
        script.booster.backward(script.loss(batch) / 3, script.optimizer)
        if number % 3 == 0:
            script.update()


def without_sync(script: Script) -> None:
    """Step after every third batch, and synchronize before the step only."""
    for number, batch in enumerate(script.all_batches(), 1):
        is_due = number % 3 == 0
        with nullcontext() if is_due else script.booster.no_sync(script.model, script.optimizer):
            script.booster.backward(script.loss(batch) / 3, script.optimizer)
        if is_due:
            script.update()


def only_at_the_last(script: Script) -> None:
    """Step only where the global batch is complete, and log the mean loss there."""
    for batch in script.all_batches():
        loss = script.loss(batch)
        script.booster.backward(loss, script.optimizer)
        mean = script.loader.mean(loss)
        assert (mean is not None) == script.loader.is_last
        if script.loader.is_last:
            script.means.append(mean)
            script.update()


def every_third_global_batch(script: Script) -> None:
    number = 0
    for batch in script.all_batches():
        script.booster.backward(script.loss(batch) / 3, script.optimizer)
        number += script.loader.is_last
        if script.loader.is_last and number % 3 == 0:
            script.update()


def two_losses(script: Script) -> None:
    """Call forward and backward twice per batch, each for a part of the loss."""
    for batch in script.all_batches():
        for share in (0.25, 0.75):
            script.booster.backward(script.loss(batch) * share, script.optimizer)
        script.update()


def evaluation_mode(script: Script) -> None:
    """Train a model in evaluation mode, and run other data through it in training mode without a backward pass."""
    script.model.eval()
    for batch in script.all_batches():
        script.train_with(batch)
        script.model.eval()
        with torch.no_grad():
            script.model(torch.zeros(2, 8))


def clipped_by_value(script: Script) -> None:
    for batch in script.all_batches():
        script.booster.backward(script.loss(batch), script.optimizer)
        script.optimizer.clip_grad_by_value(CLIP_VALUE)
        script.update()


def schedule_that_was_not_boosted(script: Script) -> None:
    for batch in script.all_batches():
        script.train_with(batch)
        script.schedule.step()


LOOPS: dict[Loop, tuple[int, float]] = {
    usual: (1, 1.0),
    prefetched: (1, 1.0),
    only_at_the_last: (1, 1.0),
    every_third_global_batch: (3, 1.0),
    two_losses: (1, 1.0),
    evaluation_mode: (1, 1.0),
    clipped_by_value: (1, 1.0),
    schedule_that_was_not_boosted: (1, 0.9),
    accumulated: (3, 1.0),
    without_sync: (3, 1.0),
}
"""Loops with the global batches per step and the factor of the learning rate per step."""
ON_WHOLE_BATCHES = (accumulated, without_sync)
"""Loops that count the batches of the loader, so that each must be a global batch."""


@unmeasured
def run_each(stages: list[int], folder: str) -> list[tuple[str, str, dict[str, Any]]]:
    ranks, results = torch.distributed.get_world_size(), []
    for stage in stages:
        for number, loop in enumerate(LOOPS):
            divisions = (WHOLE,) if loop in ON_WHOLE_BATCHES else (WHOLE, PARTS)
            for division in divisions if IS_THOROUGH else (divisions[(stage + number) % len(divisions)],):
                script = Script(stage, division[ranks], folder)
                loop(script)
                result = {
                    "batches": script.batches,
                    "parameters": flat(script.model),
                    "means": script.means,
                }
                results.append((loop.__name__, f"stage {stage}, {division[ranks]}", result))
    return results


def train_alone(
    batches: list[list[int]], per_step: int, factor: float, clip: float = math.inf
) -> tuple[Tensor, list[float]]:
    """Train one process on these global batches. Returns the parameters, and the mean loss of each global batch."""
    data, model = Numbered(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    means = []
    for number, batch in enumerate(batches, 1):
        inputs, targets = zip(*(data[index] for index in batch), strict=True)
        loss = cross_entropy(model(torch.stack(inputs)), torch.stack(targets))
        (loss / per_step).backward()
        means.append(loss.item())
        if number % per_step == 0:
            nn.utils.clip_grad_value_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= factor
    return torch.cat([value.detach().flatten() for value in model.parameters()]), means


def assert_as_alone(
    results: list[list[Any]], alone: Callable[[str, list[list[int]]], tuple[Tensor, list[float]]], numbers: str
) -> None:
    """Assert, by case, that the ranks have trained as one process did on the same global batches. ``alone`` returns its
    parameters, and the numbers that ranks may have under the name ``numbers``."""
    for of_case in zip(*results, strict=True):
        name, case, _ = of_case[0]
        together: dict[tuple[int, int], list[int]] = {}
        for _, _, result in of_case:
            for epoch, index, *ids in result["batches"]:
                together.setdefault((epoch, index), []).extend(ids)
        batches = [together[key] for key in sorted(together)]
        assert [len(batch) for batch in batches] == [GLOBAL_BATCH] * 6
        expected, wanted = alone(name, batches)
        assert_trained([[result["parameters"]] for _, _, result in of_case], [case], expected, 1e-5, 1e-6)
        for _, _, result in of_case:
            assert result[numbers] == pytest.approx(wanted if result[numbers] else [], rel=1e-5), case


@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_train_as_one_process_does(ranks: int, tmp_path: Path) -> None:
    def alone(name: str, batches: list[list[int]]) -> tuple[Tensor, list[float]]:
        per_step, factor = next(value for loop, value in LOOPS.items() if loop.__name__ == name)
        return train_alone(batches, per_step, factor, CLIP_VALUE if name == clipped_by_value.__name__ else math.inf)

    stages = [0, 1, 2, 3] if IS_THOROUGH or ranks == 2 else [1]
    assert_as_alone(run_ranks(ranks, run_each, stages, str(tmp_path)), alone, "means")


def plain_backward(script: Script) -> None:
    for batch in script.all_batches():
        script.loss(batch).backward()
        script.update()


def rate_of_each_part(script: Script) -> None:
    """Change the learning rate after each batch of the loader, without a schedule that could be found."""
    for batch in script.all_batches():
        script.train_with(batch)
        for group in script.optimizer.param_groups:
            group["lr"] *= 0.9


def first_part_again(script: Script) -> None:
    batch = next(iter(next(script.epochs())))
    for _ in range(3):
        script.train_with(batch)


def joined(script: Script) -> None:
    for batches in script.epochs():
        for one, other in zip(batches, batches, strict=False):
            script.train_with((torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])))


def left_out(script: Script) -> None:
    for batches in script.epochs():
        for number, batch in enumerate(batches):
            if number != 2:
                script.train_with(batch)


def step_without_sync(script: Script) -> None:
    for batch in script.all_batches():
        with script.booster.no_sync(script.model, script.optimizer):
            script.train_with(batch)


REFUSED = {
    plain_backward: "a backward pass other than booster.backward(loss, optimizer)",
    accumulated: "the loop accumulates gradients over several batches by itself",
    rate_of_each_part: "the learning rate changed from 0.1 to 0.09",
    first_part_again: "is passed forward again after optimizer.step()",
    joined: "the inputs of the model were computed from several batches",
    left_out: "micro-batch 0 of global batch 1 was drawn, but the next forward pass is that of micro-batch 1",
    step_without_sync: "the last backward pass ran inside no_sync()",
}


@unmeasured
def refuse_each(stages: list[int], folder: str) -> list[tuple[str, str, str]]:
    """The error of each loop that is refused, and what it should contain."""
    found = []
    for stage in stages:
        for loop, words in REFUSED.items():
            if loop is step_without_sync and stage > 1:
                continue
            script = Script(stage, PARTS[torch.distributed.get_world_size()], folder)
            try:
                loop(script)
                message = "no error"
            except RuntimeError as error:
                message = str(error)
            found.append((f"{loop.__name__}, stage {stage}", message, words))
    return found


def test_loops_that_would_train_to_other_weights_are_refused_on_every_rank(tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(2, refuse_each, [0, 1, 2, 3], str(tmp_path))):
        for case, message, words in results:
            assert words in message, (rank, case)
