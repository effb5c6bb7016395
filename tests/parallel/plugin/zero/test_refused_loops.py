"""Training loops that would train to other weights are refused, on every rank and in words."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.plugin.zero import test_training_loops as loops
from tests.parallel.plugin.zero.test_training_loops import ALL, NORM, PARTS, Batch, Loop, Script, each
from tests.support.checks import if_thorough, on
from tests.support.zero_runs import unmeasured


def penalty_of_its_own(script: Script, batch: Batch) -> None:
    loss = script.loss(batch)
    (0.1 * loss).backward(retain_graph=True)
    script.booster.backward(loss, script.optimizer)
    script.update()


def rate_of_each_part(script: Script, batch: Batch) -> None:
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
    return loops.between(lambda script: use(list(script.model.parameters())))


def hooked(hook: Callable[..., Any], late: bool = False) -> Loop:
    def iteration(script: Script, batch: Batch) -> None:
        for parameter in script.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook) if late else parameter.register_hook(hook)
        script.train_with(batch)

    return each(iteration)


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def noisy(gradient: Tensor) -> None:
    gradient.add_(torch.randn_like(gradient), alpha=0.01)


def step_in_backward(parameter: nn.Parameter) -> None:
    parameter.data.sub_(parameter.grad, alpha=loops.RATE)
    parameter.grad = None


def backward_left_out(script: Script, batch: Batch) -> None:
    loss = script.loss(batch)
    if script.loader.current.global_batch == 1:
        script.optimizer.zero_grad()
        return
    script.booster.backward(loss, script.optimizer)
    script.update()


CLIP, LOST = "optimizer.clip_grad_by_norm() and optimizer.clip_grad_by_value()", "was replaced or removed, but "
PLAIN = "a backward pass other than booster.backward(loss, optimizer)"
SECOND = "there is a second backward pass since the latest forward pass"
NOT_NEXT = "micro-batch 0 of global batch 1 was drawn, but the next forward pass is that of micro-batch 1"
REFUSED: dict[str, tuple[Loop, str, tuple[int, ...]]] = {
    "plain backward": (each(lambda script, batch: [script.loss(batch).backward(), script.update()]), PLAIN, ALL),
    "own backward": (each(penalty_of_its_own), PLAIN, ALL),
    "accumulated": (loops.accumulated, "the loop accumulates gradients over several batches by itself", ALL),
    "rate": (each(rate_of_each_part), "the learning rate changed from 0.1 to 0.09", ALL),
    "again": (first_part_again, "is passed forward again after optimizer.step()", ALL),
    "joined": (joined, "the inputs of the model were computed from several batches", ALL),
    "left out": (left_out, NOT_NEXT, ALL),
    "torch norm": (used(partial(nn.utils.clip_grad_norm_, max_norm=NORM)), CLIP, ALL),
    "log": (used(lambda given: sum(float(one.grad.norm()) for one in given if one.grad is not None)), CLIP, ALL),
    "replaced": (used(lambda given: [setattr(one, "grad", torch.zeros_like(one)) for one in given]), LOST, (0, 1, 2)),
    "one removed": (used(lambda given: setattr(given[1], "grad", None)), LOST, (0, 1, 2)),
    "hook that clips": (hooked(limited), "the hook limited on the parameter", ALL),
    "hook that adds noise": (hooked(noisy), "the hook noisy on the parameter", ALL),
    "mask": (hooked(loops.mask), "FSDP calls no hooks of parameters", (3,)),
    "step in backward": (hooked(step_in_backward, late=True), "this rank's micro-batch", ALL),
    "closure": (each(lambda s, b: s.optimizer.step(lambda: s.backward(b))), "step(closure) is not possible", ALL),
    "two passes": (each(loops.two_passes), SECOND, (3,)),
    "two forward passes": (each(loops.two_forwards_first), SECOND, (3,)),
    "counted, torch": (loops.between(loops.clip_by_torch), "it is corrected before the step", (0,)),
    "a batch without backward": (each(backward_left_out), "Call booster.backward for every batch on every rank", ALL),
}
"""Loops with words of the error, and stages."""


@on(2)
@if_thorough(3)
@unmeasured
def loops_that_would_train_to_other_weights_are_refused_on_every_rank() -> None:
    wrong = []
    for name, (loop, words, stages) in REFUSED.items():
        for stage in loops.some(stages, name, dist.get_world_size()):
            script, message = Script(stage, PARTS[dist.get_world_size()], **loops.OPTIONS.get(name, {})), "no error"
            try:
                loop(script)
            except (RuntimeError, ValueError) as error:
                message = str(error)
            wrong += [] if words in message else [f"{name}, stage {stage}: {message}"]
    assert not wrong, "\n".join(wrong)
