"""Training loops of all kinds train as one process does on the same batches, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from colossalai.booster import Booster
from colossalai.interface import OptimizerWrapper
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.checks import Checks, of_all_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import zero_plugin
from tests.support.zero_runs import (
    Numbered,
    assert_trained,
    boosted,
    flat,
    global_batches,
    make_model,
    sizes_by_rank,
    unmeasured,
)

checks = Checks()
GLOBAL_BATCH = 8
EPOCHS = 2
RATE = 0.1
NORM = 0.05
"""Below the norm of all gradients."""
CLASSES = (1.0, 2.0, 3.0)
"""Weights of classes, so that a loss is a mean over what is known only when all micro-batches are there."""

WHOLE = {2: [[7], [1]], 3: [[5], [0], [3]]}
"""By number of ranks: a division in which every rank has one micro-batch."""
PARTS = {2: [[4, 1], [1, 2]], 3: [[2, 2], [1, 0], [2, 1]]}
"""By number of ranks: a division in which every rank has two micro-batches."""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


class Script:
    """What a training script has after ``booster.boost``, the samples that it trains with, and numbers that it logs."""

    def __init__(self, stage: int, division: list[list[int]], **options: Any) -> None:
        run = boosted(
            *(stage, None, sgd),
            division=division,
            loader=dict(shuffle=True, seed=11, drop_last=True),
            max_micro_batch=8,
            **options,
        )
        _, self.booster, self.model, self.optimizer, self.criterion, self.loader, _ = run
        self.batches: list[list[int]] = []
        self.numbers: list[float] = []

    def epochs(self) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        for epoch in range(EPOCHS):
            self.loader.set_epoch(epoch)
            yield self._batches(epoch)

    def all_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batches in self.epochs():
            yield from batches

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.criterion(self.model(batch[0]), batch[1])

    def backward(self, batch: tuple[Tensor, Tensor]) -> None:
        self.booster.backward(self.loss(batch), self.optimizer)

    def train_with(self, batch: tuple[Tensor, Tensor]) -> None:
        """The usual iteration."""
        self.backward(batch)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log(self, number: Any) -> None:
        """At the last micro-batch of a global batch."""
        if self.loader.is_last:
            self.numbers.append(float(number))

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, targets in self.loader:
            drawn = self.loader._drawn
            ids = inputs[:, 7].long().tolist() if drawn.samples else []
            self.batches.append([epoch, drawn.global_batch, *ids])
            yield inputs, targets


Loop = Callable[[Script], None]


def each(iteration: Callable[[Script, Any], None]) -> Loop:
    """The loop that runs ``iteration`` for each batch."""

    def loop(script: Script) -> None:
        for batch in script.all_batches():
            iteration(script, batch)

    return loop


# Loops of other forms ------------------------------------------------------------------------------------------------


def prefetched(script: Script) -> None:
    """Take one batch ahead, and copy and change it, as the prefetchers of NVIDIA and timm do."""
    for batches in script.epochs():
        following = None
        for inputs, targets in batches:
            following, batch = (inputs.clone().mul_(1.0).to(torch.float32), targets.clone()), following
            if batch is not None:
                script.train_with(batch)
        script.train_with(following)


def accumulated(script: Script, no_sync: bool = False) -> None:
    """Step after every third batch; with ``no_sync``, all but the last of them are in its block."""
    for number, batch in enumerate(script.all_batches(), 1):
        is_due = number % 3 == 0
        waits = no_sync and not is_due
        with script.booster.no_sync(script.model, script.optimizer) if waits else nullcontext():
            script.booster.backward(script.loss(batch) / 3, script.optimizer)
        if is_due:
            script.update()


def only_at_the_last(script: Script, batch: Any) -> None:
    """Step only where the global batch is complete, and log the mean loss there."""
    loss = script.loss(batch)
    script.booster.backward(loss, script.optimizer)
    mean = script.loader.mean(loss)
    assert (mean is not None) == script.loader.is_last
    if script.loader.is_last:
        script.log(mean)
        script.update()


def every_third_global_batch(script: Script) -> None:
    number = 0
    for batch in script.all_batches():
        script.booster.backward(script.loss(batch) / 3, script.optimizer)
        number += script.loader.is_last
        if script.loader.is_last and number % 3 == 0:
            script.update()


def two_losses(script: Script, batch: Any) -> None:
    """Call forward and backward twice per batch, each for a part of the loss."""
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


def two_passes(script: Script, batch: Any) -> None:
    loss = script.loss(batch)
    script.optimizer.backward(loss * 0.25, retain_graph=True)
    script.optimizer.backward(loss * 0.75)
    script.update()


def two_forwards_first(script: Script, batch: Any) -> None:
    losses = [script.loss(batch) * share for share in (0.5, 0.3, 0.2)]
    for loss in losses:
        script.booster.backward(loss, script.optimizer)
    script.update()


def parts_of_two_outputs(script: Script, batch: Any) -> None:
    """Losses of different samples of one forward pass, and a penalty of the parameters."""
    outputs = script.model(batch[0])
    losses = cross_entropy(outputs, batch[1], reduction="none")
    script.optimizer.backward(losses[::2].sum() / len(losses), retain_graph=True)
    script.optimizer.backward(losses[1::2].sum() / len(losses), retain_graph=True)
    script.optimizer.backward(losses.mean() * 0.0)
    script.update()


# Loops that use gradients before the step ----------------------------------------------------------------------------


def zero_grad_of_module(script: Script, batch: Any) -> None:
    script.backward(batch)
    script.optimizer.step()
    script.model.zero_grad()


def zero_grad_before(script: Script, batch: Any) -> None:
    script.model.module.zero_grad()
    script.backward(batch)
    script.optimizer.step()


def own_zero_grad(script: Script, batch: Any) -> None:
    loss = script.loss(batch)
    for parameter in script.model.parameters():
        parameter.grad = None
    script.booster.backward(loss, script.optimizer)
    script.optimizer.step()


def clipped_by_norm(script: Script, batch: Any) -> None:
    script.backward(batch)
    script.log(script.optimizer.clip_grad_by_norm(NORM))
    script.update()


def clipped_by_both(script: Script, batch: Any) -> None:
    script.backward(batch)
    script.optimizer.clip_grad_by_norm(2 * NORM)
    script.log(script.optimizer.clip_grad_by_norm(NORM))
    script.optimizer.clip_grad_by_value(NORM / 4)
    script.update()


def clipped_at_the_second_step(script: Script, batch: Any) -> None:
    script.backward(batch)
    if script.loader.current.global_batch == 1:
        script.optimizer.clip_grad_by_norm(NORM)
    script.update()


def clipped_by_torch(script: Script, batch: Any) -> None:
    script.backward(batch)
    if script.loader.is_last:
        script.log(nn.utils.clip_grad_norm_(script.model.parameters(), NORM))
    script.update()


def mask(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 3 > 0)


mask.is_linear = True  # type: ignore[attr-defined]


def masked(script: Script, batch: Any) -> None:
    for parameter in script.model.parameters():
        if not parameter._backward_hooks:
            parameter.register_hook(mask)
    script.train_with(batch)


def count(batch: Any) -> Tensor:
    return torch.tensor(CLASSES)[batch[1]].sum()


def counted(script: Script, batch: Any) -> None:
    script.criterion = nn.CrossEntropyLoss(torch.tensor(CLASSES))
    clipped_by_norm(script, batch)


OPTIONS: dict[str, dict[str, Any]] = {"counted": dict(weight_by=count), "counted, torch": dict(weight_by=count)}
"""Arguments of the plugin, by name of a case."""
ALL = (0, 1, 2, 3)


class Exact(NamedTuple):
    loop: Loop
    stages: tuple[int, ...] = ALL
    per_step: int = 1
    """Global batches of a step."""
    counts_batches: bool = False
    """Whether the loop counts the batches of the loader, so that each must be a global batch."""


EXACT = {
    "usual": Exact(each(Script.train_with)),
    "prefetched": Exact(prefetched),
    "mean": Exact(each(only_at_the_last)),
    "every third": Exact(every_third_global_batch, per_step=3),
    "accumulated": Exact(accumulated, per_step=3, counts_batches=True),
    "no_sync": Exact(partial(accumulated, no_sync=True), per_step=3, counts_batches=True),
    "two losses": Exact(each(two_losses)),
    "evaluation mode": Exact(evaluation_mode),
    "two passes": Exact(each(two_passes), (0, 1, 2)),
    "two forward passes": Exact(each(two_forwards_first), (0, 1, 2)),
    "parts": Exact(each(parts_of_two_outputs), (0, 1, 2)),
    "zero_grad of the module": Exact(each(zero_grad_of_module)),
    "zero_grad before": Exact(each(zero_grad_before)),
    "own zero_grad": Exact(each(own_zero_grad)),
    "norm": Exact(each(clipped_by_norm)),
    "both": Exact(each(clipped_by_both)),
    "second": Exact(each(clipped_at_the_second_step)),
    "torch": Exact(each(clipped_by_torch), (0,)),
    "mask": Exact(each(masked), (0, 1, 2)),
    "counted": Exact(each(counted)),
}


def some(stages: tuple[int, ...], name: str) -> list[int]:
    """One of the stages 1 and 2, which have one kind of optimizer, and the others; with ``thorough`` all."""
    left_out = () if IS_THOROUGH or len(stages) < 3 else (1 + len(name) % 2,)
    chosen = [stage for stage in stages if stage not in left_out]
    return chosen if IS_THOROUGH or torch.distributed.get_world_size() == 2 else chosen[1:2]


def train_each() -> list[tuple[str, str, Any]]:
    results, ranks = [], torch.distributed.get_world_size()
    for name, exact in EXACT.items():
        divisions = (WHOLE,) if exact.counts_batches else (PARTS, WHOLE)[: 2 if IS_THOROUGH or name == "usual" else 1]
        for stage in some(exact.stages, name):
            for division in divisions:
                case = f"{name}, stage {stage}, {division[ranks]}"
                script = Script(stage, division[ranks], **OPTIONS.get(name, {}))
                try:
                    exact.loop(script)
                except Exception as error:
                    raise AssertionError(case) from error
                results.append((name, case, (script.batches, flat(script.model), script.numbers)))
    return results


def train_alone(name: str, batches: list[list[int]]) -> tuple[Tensor, list[float]]:
    """Train one process on these global batches. Returns the parameters, and the numbers that the loop logs."""
    data, model, numbers = Numbered(), make_model(), []
    optimizer, per_step = sgd(model), EXACT[name].per_step
    for number, batch in enumerate(batches, 1):
        inputs, targets = zip(*(data[index] for index in batch), strict=True)
        weights = torch.tensor(CLASSES) if name == "counted" else None
        loss = cross_entropy(model(torch.stack(inputs)), torch.stack(targets), weights)
        (loss / per_step).backward()
        if name == "mean":
            numbers.append(loss.item())
        if number % per_step:
            continue
        if name == "both":
            nn.utils.clip_grad_norm_(model.parameters(), 2 * NORM)
        if name in ("norm", "torch", "both", "counted") or (name == "second" and number % 3 == 2):
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), NORM))
            numbers += [] if name == "second" else [norm]
        if name == "both":
            nn.utils.clip_grad_value_(model.parameters(), NORM / 4)
        for parameter in model.parameters() if name == "mask" else ():
            parameter.grad = mask(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), numbers


@checks.on(2)
@checks.on(3)
@unmeasured
def loops_train_as_one_process_does() -> None:
    for of_case in zip(*of_all_ranks(train_each()), strict=True):
        name, case, _ = of_case[0]
        together: dict[tuple[int, int], list[int]] = {}
        for _, _, (batches, _, _) in of_case:
            for epoch, index, *ids in batches:
                together.setdefault((epoch, index), []).extend(ids)
        every = [together[key] for key in sorted(together)]
        assert [len(batch) for batch in every] == [GLOBAL_BATCH] * 6, case
        expected, logged = train_alone(name, every)
        assert_trained([[parameters] for _, _, (_, parameters, _) in of_case], [case], expected, 1e-5, 1e-6)
        for _, _, (_, _, numbers) in of_case:
            assert numbers == pytest.approx(logged, rel=1e-5), case


# Loops that are refused ----------------------------------------------------------------------------------------------


def plain_backward(script: Script, batch: Any) -> None:
    script.loss(batch).backward()
    script.update()


def rate_of_each_part(script: Script, batch: Any) -> None:
    """Change the learning rate after each batch of the loader, without a schedule that could be found."""
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


def used(use: Callable[[list[nn.Parameter]], Any]) -> Loop:
    """A loop that calls ``use`` with the parameters between backward pass and step."""

    def iteration(script: Script, batch: Any) -> None:
        script.backward(batch)
        use(list(script.model.parameters()))
        script.update()

    return each(iteration)


def replaced(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def one_removed(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = None


def total_norm(parameters: list[nn.Parameter]) -> float:
    return sum(float(each.grad.norm()) for each in parameters if each.grad is not None)


def hooked(hook: Callable[..., Any], late: bool = False) -> Loop:
    def iteration(script: Script, batch: Any) -> None:
        for parameter in script.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook) if late else parameter.register_hook(hook)
        script.train_with(batch)

    return each(iteration)


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def noisy(gradient: Tensor) -> None:
    gradient.add_(torch.randn_like(gradient), alpha=0.01)


def step_in_backward(parameter: nn.Parameter) -> None:
    parameter.data.sub_(parameter.grad, alpha=RATE)
    parameter.grad = None


def penalty_of_its_own(script: Script, batch: Any) -> None:
    loss = script.loss(batch)
    (0.1 * loss).backward(retain_graph=True)
    script.booster.backward(loss, script.optimizer)
    script.update()


def closure(script: Script, batch: Any) -> None:
    script.optimizer.step(lambda: script.backward(batch))


def backward_left_out(script: Script, batch: Any) -> None:
    """Leave out a batch, as if its loss were not finite."""
    loss = script.loss(batch)
    if script.loader.current.global_batch == 1:
        script.optimizer.zero_grad()
        return
    script.booster.backward(loss, script.optimizer)
    script.update()


CLIP, LOST = "optimizer.clip_grad_by_norm() and optimizer.clip_grad_by_value()", "was replaced or removed, but "
PLAIN = "a backward pass other than booster.backward(loss, optimizer)"
SECOND = "there is a second backward pass since the latest forward pass"
REFUSED: dict[str, tuple[Loop, str, tuple[int, ...]]] = {
    "plain backward": (each(plain_backward), PLAIN, ALL),
    "own backward": (each(penalty_of_its_own), PLAIN, ALL),
    "accumulated": (accumulated, "the loop accumulates gradients over several batches by itself", ALL),
    "rate": (each(rate_of_each_part), "the learning rate changed from 0.1 to 0.09", ALL),
    "again": (first_part_again, "is passed forward again after optimizer.step()", ALL),
    "joined": (joined, "the inputs of the model were computed from several batches", ALL),
    "left out": (
        left_out, "micro-batch 0 of global batch 1 was drawn, but the next forward pass is that of micro-batch 1", ALL,
    ),
    "torch norm": (used(partial(nn.utils.clip_grad_norm_, max_norm=NORM)), CLIP, ALL),
    "log": (used(total_norm), CLIP, ALL),
    "replaced": (used(replaced), LOST, (0, 1, 2)),
    "one removed": (used(one_removed), LOST, (0, 1, 2)),
    "hook that clips": (hooked(limited), "the hook limited on the parameter", ALL),
    "hook that adds noise": (hooked(noisy), "the hook noisy on the parameter", ALL),
    "mask": (hooked(mask), "FSDP calls no hooks of parameters", (3,)),
    "step in backward": (hooked(step_in_backward, late=True), "this rank's micro-batch", ALL),
    "closure": (each(closure), "optimizer.step(closure) is not possible", ALL),
    "two passes": (each(two_passes), SECOND, (3,)),
    "two forward passes": (each(two_forwards_first), SECOND, (3,)),
    "counted, torch": (each(clipped_by_torch), "it is corrected before the step", (0,)),
    "a batch without backward": (each(backward_left_out), "Call booster.backward for every batch on every rank", ALL),
}  # fmt: skip
"""Loops with words of the error, and stages."""


@checks.on(2)
@checks.if_thorough(3)
@unmeasured
def loops_that_would_train_to_other_weights_are_refused_on_every_rank() -> None:
    wrong = []
    for name, (loop, words, stages) in REFUSED.items():
        for stage in some(stages, name):
            script = Script(stage, PARTS[torch.distributed.get_world_size()], **OPTIONS.get(name, {}))
            message = "no error"
            try:
                loop(script)
            except (RuntimeError, ValueError) as error:
                message = str(error)
            wrong += [] if words in message else [f"{name}, stage {stage}: {message}"]
    assert not wrong, "\n".join(wrong)


@checks.on(2)
@unmeasured
def optimizers_that_need_a_closure_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^LBFGS\.step needs a closure"):
        boosted(0, None, lambda model: torch.optim.LBFGS(model.parameters()))


# Two models of one loop ----------------------------------------------------------------------------------------------


def two_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))


def adversarial(models: Any, optimizers: Any, batches: Any) -> list[Tensor]:
    """Train a generator and a discriminator, each with an optimizer. The one that is not trained is frozen."""
    (generator, discriminator), (first, second) = models, optimizers
    for inputs, _ in batches:
        made = generator(inputs)
        update(second, nn.functional.softplus(discriminator(made.detach()) - discriminator(inputs)).mean())
        discriminator.requires_grad_(False)
        update(first, nn.functional.softplus(-discriminator(made)).mean())
        discriminator.requires_grad_(True)
    return [flat(each) for each in models]


def update(optimizer: Any, loss: Tensor) -> None:
    """As a loop does, boosted or in one process."""
    optimizer.backward(loss) if isinstance(optimizer, OptimizerWrapper) else loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


@checks.on(2)
@checks.if_thorough(3)
@unmeasured
def two_models_train_on_the_batches_of_one_loader() -> None:
    alone, ranks = two_models(), torch.distributed.get_world_size()
    expected = adversarial(alone, [plain_sgd(model) for model in alone], global_batches(Numbered(24), 8))
    for stage in (0, 1, 2):
        for division in (WHOLE[ranks], PARTS[ranks])[: 2 if IS_THOROUGH or stage == 1 else 1]:
            plugin = zero_plugin(stage, GLOBAL_BATCH, max_micro_batch=8, weight_by="samples", training_step=mean_square)
            booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(Numbered(24))
            models, optimizers = list(two_models()), []
            for number, model in enumerate(models):
                models[number], optimizer, _, loader, _ = booster.boost(model, plain_sgd(model), None, loader)
                optimizers.append(optimizer)
            loader.divide_by(lambda samples, division=division: sizes_by_rank(division, samples))
            if division in PARTS.values():
                with pytest.raises(RuntimeError, match="is passed forward again after"):
                    adversarial(models, optimizers, loader)
            else:
                case = f"stage {stage}, {division}"
                assert_trained([adversarial(models, optimizers, loader)], [case, case], expected, 1e-5)


def mean_square(model: nn.Module, _: Any, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


test_on_ranks = checks.test()
