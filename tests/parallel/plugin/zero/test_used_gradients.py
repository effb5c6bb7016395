"""Loops that use gradients before the step, or run their own backward passes, are exact or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.parallel.plugin.zero.test_training_loops import GLOBAL_BATCH, PARTS, RATE, WHOLE, Script, assert_as_alone
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import zero_plugin
from tests.support.zero_runs import (
    Numbered,
    assert_trained,
    flat,
    global_batches,
    make_model,
    sizes_by_rank,
    unmeasured,
)

NORM = 0.05
"""Below the norm of all gradients."""

Norms = list[float]


def each_batch(script: Script, iteration: Callable[[Script, Any], float | None]) -> Norms:
    """Run ``iteration`` for each batch; the numbers that it returns at the last micro-batches of global batches."""
    norms = []
    for batch in script.all_batches():
        norm = iteration(script, batch)
        if norm is not None and script.loader.is_last:
            norms.append(float(norm))
    return norms


def backward(script: Script, batch: Any) -> None:
    script.booster.backward(script.loss(batch), script.optimizer)


def zero_grad_of_module(script: Script, batch: Any, **options: bool) -> None:
    backward(script, batch)
    script.optimizer.step()
    script.model.zero_grad(**options)


def zero_grad_before(script: Script, batch: Any) -> None:
    script.model.module.zero_grad()
    backward(script, batch)
    script.optimizer.step()


def own_zero_grad(script: Script, batch: Any) -> None:
    loss = script.loss(batch)
    for parameter in script.model.parameters():
        parameter.grad = None
    script.booster.backward(loss, script.optimizer)
    script.optimizer.step()


def clipped_by_norm(script: Script, batch: Any) -> float:
    backward(script, batch)
    norm = script.optimizer.clip_grad_by_norm(NORM)
    script.update()
    return norm


def clipped_by_both(script: Script, batch: Any) -> float:
    backward(script, batch)
    script.optimizer.clip_grad_by_norm(2 * NORM)
    norm = script.optimizer.clip_grad_by_norm(NORM)
    script.optimizer.clip_grad_by_value(NORM / 4)
    script.update()
    return norm


def clipped_at_the_second_step(script: Script, batch: Any) -> None:
    backward(script, batch)
    if script.loader.current.global_batch == 1:
        script.optimizer.clip_grad_by_norm(NORM)
    script.update()


def clipped_by_torch(script: Script, batch: Any) -> float | None:
    backward(script, batch)
    norm = nn.utils.clip_grad_norm_(script.model.parameters(), NORM) if script.loader.is_last else None
    script.update()
    return norm


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


def summed(script: Script, batch: Any) -> None:
    losses = [script.loss(batch) * share for share in (0.5, 0.3, 0.2)]
    script.booster.backward(sum(losses), script.optimizer)
    script.update()


def parts_of_two_outputs(script: Script, batch: Any) -> None:
    """Losses of different samples of one forward pass, and a penalty of the parameters."""
    outputs = script.model(batch[0])
    losses = cross_entropy(outputs, batch[1], reduction="none")
    script.optimizer.backward(losses[::2].sum() / len(losses), retain_graph=True)
    script.optimizer.backward(losses[1::2].sum() / len(losses), retain_graph=True)
    script.optimizer.backward(losses.mean() * 0.0)
    script.update()


def mask(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 3 > 0)


def masked(script: Script, batch: Any) -> None:
    for parameter in script.model.parameters():
        if not parameter._backward_hooks:
            parameter.register_hook(mask)
    backward(script, batch)
    script.update()


CLASSES = (1.0, 2.0, 3.0)
"""Weights of classes, so that a loss is a mean over what is known only when all micro-batches are there."""


def count(batch: Any) -> Tensor:
    return torch.tensor(CLASSES)[batch[1]].sum()


def counted(script: Script, batch: Any) -> float:
    script.criterion = nn.CrossEntropyLoss(torch.tensor(CLASSES))
    return clipped_by_norm(script, batch)


OPTIONS: dict[str, dict[str, Any]] = {"counted": dict(weight_by=count), "counted, torch": dict(weight_by=count)}
"""Arguments of the plugin, by name of a case."""

EXACT: dict[str, tuple[Callable[[Script, Any], Any], tuple[int, ...]]] = {
    "zero_grad of the module": (zero_grad_of_module, (0, 1, 2, 3)),
    "zero_grad to zeros": (partial(zero_grad_of_module, set_to_none=False), (0, 1, 2, 3)),
    "zero_grad before": (zero_grad_before, (0, 1, 2, 3)),
    "own zero_grad": (own_zero_grad, (0, 1, 2, 3)),
    "norm": (clipped_by_norm, (0, 1, 2, 3)),
    "both": (clipped_by_both, (0, 1, 2, 3)),
    "second": (clipped_at_the_second_step, (0, 1, 2, 3)),
    "torch": (clipped_by_torch, (0,)),
    "two passes": (two_passes, (0, 1, 2)),
    "two forward passes": (two_forwards_first, (0, 1, 2)),
    "summed": (summed, (0, 1, 2, 3)),
    "parts": (parts_of_two_outputs, (0, 1, 2)),
    "mask": (masked, (0, 1, 2)),
    "counted": (counted, (0, 1, 2, 3)),
}


def some(stages: tuple[int, ...], name: str) -> list[int]:
    """One of the stages 1 and 2, which have one kind of optimizer, and the others; with ``thorough`` all."""
    left_out = () if IS_THOROUGH or len(stages) < 3 else (1 + len(name) % 2,)
    return [stage for stage in stages if stage not in left_out]


@unmeasured
def run_each(folder: str) -> list[tuple[str, str, dict[str, Any]]]:
    results, ranks = [], torch.distributed.get_world_size()
    for name, (iteration, stages) in EXACT.items():
        for stage in some(stages, name):
            for division in (WHOLE, PARTS) if IS_THOROUGH else (PARTS,):
                script = Script(stage, division[ranks], folder, **OPTIONS.get(name, {}))
                case = f"{name}, stage {stage}, {division[ranks]}"
                try:
                    norms = each_batch(script, iteration)
                except Exception as error:
                    raise AssertionError(case) from error
                result = dict(batches=script.batches, parameters=flat(script.model), norms=norms)
                results.append((name, case, result))
    return results


def train_alone(name: str, batches: list[list[int]]) -> tuple[Tensor, Norms]:
    data, model, norms = Numbered(), make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for number, batch in enumerate(batches):
        inputs, targets = zip(*(data[index] for index in batch), strict=True)
        weights = torch.tensor(CLASSES) if name == "counted" else None
        cross_entropy(model(torch.stack(inputs)), torch.stack(targets), weights).backward()
        if name == "both":
            nn.utils.clip_grad_norm_(model.parameters(), 2 * NORM)
        if name in ("norm", "torch", "both", "counted") or (name == "second" and number % 3 == 1):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        if name == "both":
            nn.utils.clip_grad_value_(model.parameters(), NORM / 4)
        for parameter in model.parameters() if name == "mask" else ():
            parameter.grad = mask(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([value.detach().flatten() for value in model.parameters()]), norms


@pytest.mark.parametrize("ranks", [2, 3] if IS_THOROUGH else [2])
def test_gradients_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    assert_as_alone(run_ranks(ranks, run_each, str(tmp_path)), train_alone, "norms")


def used(use: Callable[[list[nn.Parameter]], Any]) -> Callable[[Script, Any], None]:
    """An iteration in which the loop calls ``use`` with the parameters between backward pass and step."""

    def iteration(script: Script, batch: Any) -> None:
        backward(script, batch)
        use(list(script.model.parameters()))
        script.update()

    return iteration


def scaled(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad *= 0.5


def replaced(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def one_removed(parameters: list[nn.Parameter]) -> None:
    parameters[1].grad = None


def total_norm(parameters: list[nn.Parameter]) -> float:
    return sum(float(each.grad.norm()) for each in parameters if each.grad is not None)


def hooked(script: Script, batch: Any, hook: Callable[..., Any], late: bool = False) -> None:
    for parameter in script.model.parameters():
        parameter.register_post_accumulate_grad_hook(hook) if late else parameter.register_hook(hook)
    backward(script, batch)
    script.update()


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


def plain_after_weighted(script: Script, batch: Any) -> None:
    backward(script, batch)
    script.loss(batch).backward()
    script.update()


def closure(script: Script, batch: Any) -> None:
    script.optimizer.step(lambda: backward(script, batch))


def backward_left_out(script: Script, batch: Any) -> None:
    """Leave out a batch, as if its loss were not finite."""
    loss = script.loss(batch)
    if script.loader.current.global_batch == 1:
        script.optimizer.zero_grad()
        return
    script.booster.backward(loss, script.optimizer)
    script.update()


CLIP, LOST = "optimizer.clip_grad_by_norm() and optimizer.clip_grad_by_value()", "was replaced or removed, but "
REFUSED: dict[str, tuple[Callable[[Script, Any], Any], str, tuple[int, ...]]] = {
    "torch norm": (used(partial(nn.utils.clip_grad_norm_, max_norm=NORM)), CLIP, (0, 1, 2, 3)),
    "torch value": (used(partial(nn.utils.clip_grad_value_, clip_value=NORM)), CLIP, (0, 1, 2, 3)),
    "scaled": (used(scaled), CLIP, (0, 1, 2, 3)),
    "log": (used(total_norm), CLIP, (0, 1, 2, 3)),
    "replaced": (used(replaced), LOST, (0, 1, 2)),
    "one removed": (used(one_removed), LOST, (0, 1, 2)),
    "hook that clips": (partial(hooked, hook=limited), "the hook limited on the parameter", (0, 1, 2, 3)),
    "hook that adds noise": (partial(hooked, hook=noisy), "the hook noisy on the parameter", (0, 1, 2, 3)),
    "mask": (partial(hooked, hook=mask), "FSDP calls no hooks of parameters", (3,)),
    "step in backward": (partial(hooked, hook=step_in_backward, late=True), "this rank's micro-batch", (0, 1, 2, 3)),
    "own backward": (penalty_of_its_own, "a backward pass other than booster.backward", (0, 1, 2, 3)),
    "own backward after": (plain_after_weighted, "a backward pass other than booster.backward", (0, 1, 2, 3)),
    "closure": (closure, "optimizer.step(closure) is not possible", (0, 1, 2, 3)),
    "two passes": (two_passes, "there is a second backward pass since the latest forward pass", (3,)),
    "two forward passes": (two_forwards_first, "there is a second backward pass since the latest forward pass", (3,)),
    "counted, torch": (clipped_by_torch, "it is corrected before the step", (0,)),
    "left out": (backward_left_out, "Call booster.backward for every batch on every rank", (0, 1, 2, 3)),
}


def two_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))


def adversarial(models: Any, optimizers: Any, batches: Any, run: Callable[[Any, Tensor], None]) -> list[Tensor]:
    """Train a generator and a discriminator, each with an optimizer. The one that is not trained is frozen."""
    (generator, discriminator), (first, second) = models, optimizers
    for inputs, _ in batches:
        made = generator(inputs)
        run(second, nn.functional.softplus(discriminator(made.detach()) - discriminator(inputs)).mean())
        discriminator.requires_grad_(False)
        run(first, nn.functional.softplus(-discriminator(made)).mean())
        discriminator.requires_grad_(True)
    return [flat(each) for each in models]


@unmeasured
def train_adversarially(folder: str) -> list[tuple[str, list[Tensor]]]:
    def run(optimizer: Any, loss: Tensor) -> None:
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    results, ranks = [], torch.distributed.get_world_size()
    for stage in (0, 1, 2):
        for division in (WHOLE[ranks], PARTS[ranks])[: 2 if IS_THOROUGH or stage == 1 else 1]:
            plugin = zero_plugin(
                stage, GLOBAL_BATCH, max_micro_batch=8, weight_by="samples", profile_cache="", training_step=mean_square
            )
            booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(Numbered(24))
            models, optimizers = list(two_models()), []
            for number, model in enumerate(models):
                optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
                models[number], optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
                optimizers.append(optimizer)
            loader.divide_by(lambda samples, division=division: sizes_by_rank(division, samples))
            if division in PARTS.values():
                with pytest.raises(RuntimeError, match="is passed forward again after"):
                    adversarial(models, optimizers, loader, run)
            else:
                results.append((f"stage {stage}, {division}", adversarial(models, optimizers, loader, run)))
    return results


def mean_square(model: nn.Module, _: Any, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


@pytest.mark.parametrize("ranks", [2, 3] if IS_THOROUGH else [2])
def test_two_models_train_on_the_batches_of_one_loader(ranks: int, tmp_path: Path) -> None:
    def run(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    models, batches = two_models(), global_batches(Numbered(24), 8)
    expected = adversarial(models, [torch.optim.SGD(each.parameters(), lr=RATE) for each in models], batches, run)
    for results in run_ranks(ranks, train_adversarially, str(tmp_path)):
        for case, found in results:
            assert_trained([found], [f"{case}, generator", f"{case}, discriminator"], expected, 1e-5)


@unmeasured
def refuse_each(folder: str) -> list[tuple[str, str, str]]:
    """The error of each loop that is refused, and what it should contain."""
    found = []
    for name, (iteration, words, stages) in REFUSED.items():
        for stage in some(stages, name):
            script = Script(stage, PARTS[torch.distributed.get_world_size()], folder, **OPTIONS.get(name, {}))
            try:
                each_batch(script, iteration)
                message = "no error"
            except (RuntimeError, ValueError) as error:
                message = str(error)
            found.append((f"{name}, stage {stage}", message, words))
    return found


@unmeasured
def boost_with_closures() -> str:
    plugin, model = zero_plugin(0, GLOBAL_BATCH, profile_cache=""), make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError) as raised:
        Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), plugin.prepare_dataloader(Numbered()))
    return str(raised.value)


def test_optimizers_that_need_a_closure_are_refused() -> None:
    for message in run_ranks(2, boost_with_closures):
        assert message.startswith("LBFGS.step needs a closure"), message


@pytest.mark.parametrize("ranks", [2, 3] if IS_THOROUGH else [2])
def test_other_uses_are_refused(ranks: int, tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(ranks, refuse_each, str(tmp_path))):
        wrong = [f"{case}, rank {rank}: {message}" for case, message, words in results if words not in message]
        assert not wrong, "\n".join(wrong)
