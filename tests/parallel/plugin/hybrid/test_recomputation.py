"""A plan with stages that recompute trains as the same plan without, bit for bit, and these stages keep less."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from colossal_hetero import BalanceConfig
from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.hybrid.test_planned_run import train_planned
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, bert, gpt2, llama, loss_of, samples
from tests.support.counted_memory import CountedMemory
from tests.support.harness import run_ranks
from tests.support.model_families import allow_cpu
from tests.support.planning import make_plan, planned
from tests.support.sharding import randomize
from tests.support.training import boost, scripted, sgd, tiny_vit

STEPS = 3
DROPOUT = 0.2

Result = tuple[list[float | None], dict[str, Tensor], int]


def gpt2_with_dropout() -> nn.Module:
    sizes = dict(vocab_size=101, n_positions=16, n_embd=24, n_layer=4, n_head=4)
    drops = dict(resid_pdrop=DROPOUT, embd_pdrop=DROPOUT, attn_pdrop=DROPOUT, attn_implementation="eager")
    return randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops)))


def llama_with_cache() -> nn.Module:
    model = llama()
    model.config.use_cache = True
    return model


def vit() -> nn.Module:
    return tiny_vit(depth=4)


def vit_with_dropout() -> nn.Module:
    return tiny_vit(depth=4, proj_drop_rate=DROPOUT, attn_drop_rate=DROPOUT, drop_path_rate=DROPOUT)


MODELS = {
    each.__name__: each for each in (bert, gpt2, llama, gpt2_with_dropout, llama_with_cache, vit, vit_with_dropout)
}


def recomputing(plan: Plan, stages: Collection[tuple[int, int]]) -> Plan:
    """``plan`` in which these stages (replica, stage) recompute."""
    return plan.model_copy(
        update={
            "replicas": tuple(
                one.model_copy(
                    update={
                        "stages": tuple(
                            stage.model_copy(update={"recompute": (number, index) in stages})
                            for index, stage in enumerate(one.stages)
                        )
                    }
                )
                for number, one in enumerate(plan.replicas)
            )
        }
    )


def train(plan: Plan, name: str, switched_on: bool = False) -> Result:
    """Losses of this rank's replica, its parameters, and the bytes that its first micro-batch keeps for backward."""
    allow_cpu()
    torch.manual_seed(3)
    # Colossal-AI divides the vocabulary of tensor-parallel models; their own loss is in fp32.
    dtype = torch.float64 if plan.tensor_parallel == 1 else torch.float32
    module = MODELS[name]().to(dtype)
    if switched_on:
        enable = getattr(module, "gradient_checkpointing_enable", None) or module.set_grad_checkpointing
        enable()
    run = boost(planned(plan), module, sgd)
    micro_batches = run.plugin.plan.replicas[run.plugin.replica()[0]].micro_batches
    losses: list[float | None] = []
    memory, kept = CountedMemory(), list[int]()

    def keep(*_: Any) -> None:
        if not kept:
            time.sleep(0.1)  # A thread of Gloo may still hold what it has summed.
            kept.append(memory.used_bytes())

    run.model.register_forward_hook(keep)
    for step in range(STEPS):
        batch = samples("vit" if "vit" in name else name, step, plan.micro_batch * micro_batches, dtype)
        with memory:
            result = run.booster.execute_pipeline(iter([batch]), run.model, loss_of, run.optimizer, return_loss=True)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(None if result["loss"] is None else float(result["loss"]))
    return losses, run.parameters, kept[0]


def compare(plan: Plan, stages: Collection[tuple[int, int]], name: str) -> None:
    usual = run_ranks(plan.world_size, train, plan, name)
    found = run_ranks(plan.world_size, train, recomputing(plan, stages), name)
    less = {rank for number, index in stages for rank in plan.replicas[number].stages[index].ranks}
    for rank, (one, other) in enumerate(zip(usual, found, strict=True)):
        assert one[0] == other[0]
        assert one[1].keys() == other[1].keys()
        for parameter, value in one[1].items():
            assert torch.equal(value, other[1][parameter]), f"{parameter} of rank {rank} differs"
        if rank in less:
            assert other[2] < 0.5 * one[2], f"rank {rank}"
        else:
            assert other[2] == one[2], f"rank {rank}"


EQUAL: dict[str, Plan] = {
    "pp1": make_plan([[[0]]], [4], 2, 3),
    "pp2": make_plan([[[0], [1]]], [3, 1], 2, 4),
    "pp3": make_plan([[[2], [0], [1]]], [2, 1, 1], 2, 5),
    "dp2 pp2": make_plan([[[0], [1]], [[2], [3]]], [3, 1], 2, 3),
    "tp2": make_plan([[[0, 1]]], [4], 2, 2),
    "tp2 pp2": make_plan([[[0, 1], [2, 3]]], [1, 3], 2, 3),
}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama_with_cache", "vit_with_dropout"])
def test_the_first_of_two_stages_recomputes(name: str) -> None:
    compare(EQUAL["pp2"], [(0, 0)], name)


@pytest.mark.parametrize(
    ("plan", "stages", "name"),
    [
        ("pp1", [(0, 0)], "gpt2_with_dropout"),
        ("pp3", [(0, 1), (0, 2)], "gpt2_with_dropout"),
        ("dp2 pp2", [(0, 0), (1, 1)], "vit_with_dropout"),
        # Dropout of tensor-parallel layers has a random state of its own.
        ("tp2", [(0, 0)], "vit_with_dropout"),
        ("tp2 pp2", [(0, 1)], "gpt2_with_dropout"),
    ],
)
def test_stages_recompute(plan: str, stages: Collection[tuple[int, int]], name: str) -> None:
    compare(EQUAL[plan], stages, name)


@pytest.mark.parametrize(
    ("plan", "stages", "name"), [("1+2", [(0, 0), (1, 1)], "llama_with_cache"), ("2+1", [(0, 1)], "vit_with_dropout")]
)
def test_replicas_that_are_not_alike_recompute(plan: str, stages: Collection[tuple[int, int]], name: str) -> None:
    compare(PLANS[plan], stages, name)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_what_the_script_switched_on_is_not_done_twice(name: str) -> None:
    plan = recomputing(EQUAL["pp1"], [(0, 0)])
    ((_, usual, once),) = run_ranks(1, train, plan, name)
    ((_, found, both),) = run_ranks(1, train, plan, name, True)
    assert usual.keys() == found.keys() and all(torch.equal(usual[each], found[each]) for each in usual)
    assert both == once


def train_balanced(plan: Plan) -> list[float]:
    with scripted(lambda rank, iteration: 4.0 if rank == 3 else 1.0):
        run = boost(planned(plan, balance=BalanceConfig(mode="migrate")), vit(), sgd)
        losses = train_planned(run, 6)
    if dist.get_rank() > 1:
        assert max(run.plugin.balancer.plan.migrate) > 0
    return losses


def test_a_stage_that_recomputes_migrates_work_of_a_slow_rank() -> None:
    plan = EQUAL["tp2 pp2"]
    usual = run_ranks(4, train_balanced, plan)
    found = run_ranks(4, train_balanced, recomputing(plan, [(0, 1)]))
    assert found == [pytest.approx(each, rel=1e-6) for each in usual]


class Plain(nn.Module):
    """A model that does not say whether its blocks can run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))


class WithoutBlocks(nn.Linear):
    """A model that has no blocks, which may run twice."""

    supports_gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__(3, 3)


def refused(model: Any) -> str:
    with pytest.raises(ValueError) as error:
        boost(planned(recomputing(EQUAL["pp2"], [(0, 0)])), model(), sgd)
    return str(error.value)


def test_models_whose_blocks_cannot_run_twice_are_refused_on_all_ranks() -> None:
    for text in run_ranks(2, refused, Plain):
        assert "Plain does not say that its blocks can run twice" in text
    for text in run_ranks(2, refused, WithoutBlocks):
        assert "their blocks were not found: WithoutBlocks has no ModuleList" in text
