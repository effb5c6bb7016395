"""What tensor-parallel layers cannot do is refused in words, with and without a plan."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations

from colossal_hetero import BalanceConfig
from tests.support.checks import on
from tests.support.language_models import llama, plan_of, tokens
from tests.support.training import Trained, batch, boost, loss_of, ours, sgd, theirs, tiny_vit


def runs(**options: Any) -> list[Trained]:
    """Colossal-AI's plugin, ours that only measures, and ours while rank 1 gives work away, by units or columns."""
    made = [boost(theirs(tp_size=2, **options), None, sgd), boost(ours(tp_size=2, **options), None, sgd)]
    for migration in ("block", "broadcast-reduce"):
        config = BalanceConfig(mode="migrate", migration=migration, warmup_iterations=10**6, measure_costs=False)
        made.append(boost(ours(config, tp_size=2, **options), None, sgd))
        made[-1].plugin.balancer.follow(plan_of(1, 2))
    return made


@on(2)
def second_derivatives_are_refused() -> None:
    def refused(loss: Tensor, inputs: Any) -> None:
        with pytest.raises(RuntimeError, match="create_graph=True does not work through tensor-parallel layers"):
            torch.autograd.grad(loss, inputs, create_graph=True)

    for run in runs():
        images, labels = batch()
        images.requires_grad_()
        refused(loss_of(run.model(images), labels), images)
        torch.autograd.grad(run.model(images).sum(), images)
        refused(loss_of(run.model(images), labels), [each for each in run.model.parameters() if each.requires_grad])
    run = boost(ours(tp_size=2, parallel_output=True), llama(), sgd)
    inputs, labels = tokens(0)
    loss = run.model(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels).loss
    refused(loss, list(run.model.parameters())[:1])


@on(2)
def autocast_around_training_passes_is_refused() -> None:
    for run in runs()[1:]:
        images, _ = batch()
        words = r"autocast to torch.bfloat16 .*precision='bf16'"
        with pytest.raises(RuntimeError, match=words), torch.autocast("cpu", dtype=torch.bfloat16):
            run.model(images)
        run.model.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            cast = run.model(images)
        with torch.no_grad():
            torch.testing.assert_close(cast.float(), run.model(images), rtol=0.1, atol=0.1)


@on(2)
def weights_of_a_head_that_every_rank_has_may_be_computed_from_others() -> None:
    model = tiny_vit()
    parametrizations.weight_norm(model.head)
    run = boost(ours(tp_size=2), model, sgd)
    images, labels = batch()
    run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
