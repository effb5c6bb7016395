"""Scripts that only swap the plugin's class compute what they computed with Colossal-AI's, also while work migrates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossal_hetero import BalanceConfig
from colossal_hetero.plugin.hybrid import hybrid_plugin
from tests.support.checks import Checks
from tests.support.language_models import LENGTH, gpt2, llama, plan_of, tokens
from tests.support.model_families import BUILDERS
from tests.support.sharding import randomize
from tests.support.training import Trained, boost, ours, scripted, sgd, theirs

checks = Checks()

STEPS = 3
DEFAULT = BalanceConfig(reshard_after=None, head=False)
"""The plugin's; ranks of tests have another one (:mod:`tests.support.preload`)."""

Script = Callable[[Trained], list[Tensor]]
"""Trains and returns what the user sees."""


def step(run: Trained, loss: Tensor) -> Tensor:
    run.booster.backward(loss, run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.detach()


def forward(run: Trained, number: int, length: int = LENGTH, **more: Any) -> Any:
    inputs, labels = tokens(number, length)
    return run.model(**(dict(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels) | more))


def own_loss_of_logits(run: Trained) -> list[Tensor]:
    """Logits are those of the rank's own rows of the vocabulary (``parallel_output``)."""
    seen = []
    for number in range(STEPS):
        logits = forward(run, number).logits
        seen += [logits.detach().clone(), step(run, logits.float().logsumexp(-1).mean())]
    return seen


def attention_maps_and_hidden_states(run: Trained) -> list[Tensor]:
    seen = []
    for number in range(STEPS):
        inputs = torch.randint(90, (3, 6), generator=torch.Generator().manual_seed(number))
        asked = dict(output_attentions=True, output_hidden_states=True)
        outputs = run.model(input_ids=inputs, labels=inputs, **asked)
        seen += [*(each.detach() for each in (*outputs.attentions, *outputs.hidden_states))]
        seen.append(step(run, outputs.loss + outputs.attentions[0].square().sum() / 100))
    return seen


def hooks_inside_of_blocks(run: Trained) -> list[Tensor]:
    seen: list[Tensor] = []
    for module in run.model.unwrap().modules():
        if type(module).__name__ in ("GPT2MLP", "LlamaMLP"):
            first = next(module.children())
            first.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    return seen + plain(run)


def hooks_on_parameters(run: Trained) -> list[Tensor]:
    for parameter in run.model.parameters():
        parameter.register_hook(lambda gradient: 0.5 * gradient)
    return plain(run)


def plain(run: Trained) -> list[Tensor]:
    return [step(run, forward(run, number).loss) for number in range(STEPS)]


def checkpointed(run: Trained) -> list[Tensor]:
    run.model.unwrap().gradient_checkpointing_enable({"use_reentrant": False})
    return plain(run)


def evaluated_between_steps(run: Trained) -> list[Tensor]:
    seen = []
    for number in range(STEPS):
        seen.append(step(run, forward(run, number).loss))
        run.model.eval()
        with torch.no_grad():
            seen.append(forward(run, 7).logits)
        run.model.train()
    return seen


def teacher_in_training_mode(run: Trained) -> list[Tensor]:
    seen = []
    for number in range(STEPS):
        with torch.no_grad():
            target = forward(run, number).logits
        outputs = forward(run, number)
        seen.append(step(run, outputs.loss + (outputs.logits - 0.9 * target).square().mean()))
    return seen


def accumulated_and_clipped(run: Trained) -> list[Tensor]:
    seen = []
    for number in range(STEPS):
        for micro, length in enumerate((12, 7)):
            loss = forward(run, 2 * number + micro, length).loss / 2
            run.booster.backward(loss, run.optimizer)
            seen.append(loss.detach())
        run.optimizer.clip_grad_by_norm(0.5)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return seen


def blocks_left_out(run: Trained) -> list[Tensor]:
    """As layerdrop does."""
    blocks = next(module for module in run.model.unwrap().modules() if isinstance(module, nn.ModuleList))
    forwards = [block.forward for block in blocks]
    seen = []
    for number in range(STEPS):
        blocks[number % 2].forward = lambda hidden, *_, **__: (hidden,)
        seen.append(step(run, forward(run, number).loss))
        blocks[number % 2].forward = forwards[number % 2]
    return seen


def half_frozen_gpt2() -> nn.Module:
    model = gpt2()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    return model


def bert() -> nn.Module:
    return randomize(BUILDERS["bert"]()[0].train())


SCRIPTS: list[tuple[Script, Callable[[], nn.Module]]] = [
    (own_loss_of_logits, gpt2),
    (own_loss_of_logits, llama),
    (attention_maps_and_hidden_states, bert),
    (hooks_inside_of_blocks, gpt2),
    (hooks_inside_of_blocks, llama),
    (hooks_on_parameters, gpt2),
    (checkpointed, gpt2),
    (evaluated_between_steps, llama),
    (teacher_in_training_mode, gpt2),
    (accumulated_and_clipped, llama),
    (blocks_left_out, gpt2),
    (plain, half_frozen_gpt2),
]


@checks.on(2)
def scripts_see_what_they_saw_before() -> None:
    for number, (script, make) in enumerate(SCRIPTS):
        unused = script is blocks_left_out
        expected = boost(theirs(tp_size=2, custom_policy=None, find_unused_parameters=unused), make(), sgd)
        values = script(expected)
        with scripted(), patch.object(hybrid_plugin, "DEFAULT_BALANCE", DEFAULT):
            run = boost(ours(tp_size=2, find_unused_parameters=unused), make(), sgd)
        run.plugin.balancer.follow(plan_of(number % 2, 2))
        what = f"{script.__name__}, {make.__name__}"
        assert_close(script(run), values, what)
        parameters = dict(run.model.unwrap().named_parameters())
        reference = dict(expected.model.unwrap().named_parameters())
        assert_close([parameters[name] for name in reference], list(reference.values()), what)
        dist.barrier()


def assert_close(actual: list[Any], expected: list[Any], what: str) -> None:
    assert len(actual) == len(expected) > 0, what
    for place, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.shape == other.shape, f"{what}, {place}: {one.shape} instead of {other.shape}"
        difference = (one - other).abs().max().item()
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), f"{what}, {place}: differs by {difference}"


test_on_ranks = checks.test()
