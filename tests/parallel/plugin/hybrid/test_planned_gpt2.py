"""A planned GPT-2, whose first and last stage share a weight, is trained and evaluated as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.hybrid.test_planned_run import MICRO_BATCH, MICRO_BATCHES
from tests.support.harness import run_ranks
from tests.support.planning import make_plan
from tests.support.training import boost, sgd

BLOCKS, VOCABULARY, MAX_NORM = 4, 64, 0.5


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=BLOCKS, n_head=4, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    # In Colossal-AI's pipelines the default attention is not causal if it gets a padding mask.
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def texts(number: int, size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (size, 8), generator=generator)
    return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens.clone())


def train_alone(iterations: int, size: int) -> tuple[list[float], list[float]]:
    """The losses of one process in training, and in evaluation after each step, on half as many texts."""
    model = gpt2()
    optimizer = sgd(model)
    losses, evaluated = [], []
    for iteration in range(iterations):
        model(**texts(iteration, size)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float(model(**texts(iteration, size)).loss))
            evaluated.append(float(model(**texts(99, size // 2)).loss))
    return losses, evaluated


def of_last_stage(loss: Tensor | None) -> float:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, None if loss is None else float(loss))
    (share,) = {share for share in shares if share is not None}
    return share


def check_texts(plan: Plan | None, options: dict[str, Any], expected: tuple[list[float], list[float]]) -> None:
    run = boost(HeteroHybridParallelPlugin(precision="fp32", max_norm=MAX_NORM, plan=plan, **options), gpt2(), sgd)
    size = MICRO_BATCH * MICRO_BATCHES

    def execute(number: int, size: int, optimizer: Any = None) -> float:
        result = run.booster.execute_pipeline(
            iter([texts(number, size)]), run.model, lambda outputs, _: outputs.loss, optimizer, return_loss=True
        )
        return of_last_stage(result["loss"])

    losses, evaluated = [], []
    for iteration in range(len(expected[0])):
        execute(iteration, size, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        with torch.no_grad():
            losses.append(execute(iteration, size))
            if plan is not None:
                evaluated.append(execute(99, size // 2))
    assert losses == pytest.approx(expected[0], rel=1e-5)
    assert evaluated == pytest.approx(expected[1][: len(evaluated)], rel=1e-5)


@pytest.mark.parametrize(
    "rank_order, options",
    [
        pytest.param([[[1], [0]]], {}, id="pp2-reversed"),
        pytest.param([[[2], [0], [1]]], {}, id="pp3-rotated"),
        pytest.param(None, dict(tp_size=1, pp_size=2, num_microbatches=4, num_layers_per_stage=[1, 3]), id="no-plan"),
    ],
)
def test_shared_weights_are_trained_and_evaluated(rank_order: list | None, options: dict[str, Any]) -> None:
    layers = (1, 3) if rank_order is None or len(rank_order[0]) == 2 else (1, 2, 1)
    plan = None if rank_order is None else make_plan(rank_order, layers, MICRO_BATCH, MICRO_BATCHES)
    expected = train_alone(3, MICRO_BATCH * MICRO_BATCHES)
    run_ranks(len(layers), check_texts, plan, options, expected)
