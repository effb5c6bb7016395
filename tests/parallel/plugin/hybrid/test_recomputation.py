"""A plan with stages that recompute trains as the same plan without, bit for bit, and these stages keep less."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn

from colossal_hetero import BalanceConfig
from colossal_hetero.planner.cost.plan import Plan
from tests.parallel.plugin.hybrid.test_planned_run import train_planned
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, bert, gpt2, llama, loss_of, samples
from tests.support.counted_memory import CountedMemory
from tests.support.harness import run_ranks
from tests.support.model_families import allow_cpu
from tests.support.planning import make_plan, planned
from tests.support.random_examples import IS_THOROUGH
from tests.support.sharding import randomize
from tests.support.training import boost, pipeline_step, scripted, sgd, tiny_vit

STEPS = 2
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
    Randomizer.reset_index()  # an earlier model of this process has counted
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
            losses.append(pipeline_step(run, iter([batch]), loss_of))
    return losses, run.parameters, kept[0]


EQUAL: dict[str, Plan] = {
    "pp1": make_plan([[[0]]], [4], 2, 3),
    "pp2": make_plan([[[0], [1]]], [3, 1], 2, 4),
    "pp3": make_plan([[[2], [0], [1]]], [2, 1, 1], 2, 5),
    "dp2 pp2": make_plan([[[0], [1]], [[2], [3]]], [3, 1], 2, 3),
    "tp2": make_plan([[[0, 1]]], [4], 2, 2),
    "tp2 pp2": make_plan([[[0, 1], [2, 3]]], [1, 3], 2, 3),
}


Case = tuple[str, list[tuple[int, int]], str]
"""Plan, its stages (replica, stage) that recompute, and model."""

CASES: list[Case] = [
    ("pp2", [(0, 0)], "llama_with_cache"),
    ("pp2", [(0, 0)], "vit_with_dropout"),
    ("pp3", [(0, 1), (0, 2)], "gpt2_with_dropout"),
    ("1+2", [(0, 0), (1, 1)], "llama_with_cache"),
    # Dropout of tensor-parallel layers has a random state of its own.
    ("tp2 pp2", [(0, 1)], "gpt2_with_dropout"),
]
THOROUGH: list[Case] = [
    *(("pp2", [(0, 0)], name) for name in ("bert", "gpt2")),
    ("pp1", [(0, 0)], "gpt2_with_dropout"),
    ("dp2 pp2", [(0, 0), (1, 1)], "vit_with_dropout"),
    ("tp2", [(0, 0)], "vit_with_dropout"),
    ("2+1", [(0, 1)], "vit_with_dropout"),
]


def train_each(cases: list[Case]) -> list[tuple[Result, Result]]:
    """Each case without and with recomputation."""
    plans = EQUAL | PLANS
    return [(train(plans[plan], name), train(recomputing(plans[plan], stages), name)) for plan, stages, name in cases]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4] if IS_THOROUGH else [2, 3, 4])
def test_stages_recompute(ranks: int) -> None:
    plans = EQUAL | PLANS
    cases = [case for case in CASES + THOROUGH * IS_THOROUGH if plans[case[0]].world_size == ranks]
    for rank, results in enumerate(run_ranks(ranks, train_each, cases, timeout_seconds=280)):
        for (plan, stages, name), (usual, found) in zip(cases, results, strict=True):
            what = f"{plan}, {name}, rank {rank}"
            assert usual[0] == found[0], what
            assert usual[1].keys() == found[1].keys()
            for parameter, value in usual[1].items():
                assert torch.equal(value, found[1][parameter]), f"{what}, {parameter}"
            if any(rank in plans[plan].replicas[number].stages[index].ranks for number, index in stages):
                assert found[2] < 0.5 * usual[2], what
            else:
                assert found[2] == usual[2], what


def switch_on_twice() -> None:
    plan = recomputing(EQUAL["pp1"], [(0, 0)])
    for name in ("gpt2", "vit"):
        _, usual, once = train(plan, name)
        _, found, both = train(plan, name, True)
        assert usual.keys() == found.keys() and all(torch.equal(usual[each], found[each]) for each in usual), name
        assert both == once, name


def test_what_the_script_switched_on_is_not_done_twice() -> None:
    run_ranks(1, switch_on_twice)


def train_balanced(plan: Plan) -> list[float]:
    with scripted(lambda rank, iteration: 4.0 if rank == 3 else 1.0):
        run = boost(planned(plan, balance=BalanceConfig(mode="migrate")), vit(), sgd)
        losses = train_planned(run, 6)
    if dist.get_rank() > 1:
        assert max(run.plugin.balancer.plan.migrate) > 0
    return losses


def train_balanced_twice() -> tuple[list[float], list[float]]:
    return train_balanced(EQUAL["tp2 pp2"]), train_balanced(recomputing(EQUAL["tp2 pp2"], [(0, 1)]))


def test_a_stage_that_recomputes_migrates_work_of_a_slow_rank() -> None:
    for usual, found in run_ranks(4, train_balanced_twice):
        assert found == pytest.approx(usual, rel=1e-6)


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


def refuse() -> None:
    for model, words in (
        (Plain(), "Plain does not say that its blocks can run twice"),
        (WithoutBlocks(), "their blocks were not found: WithoutBlocks has no ModuleList"),
    ):
        with pytest.raises(ValueError, match=words):
            boost(planned(recomputing(EQUAL["pp2"], [(0, 0)])), model, sgd)
        dist.barrier()  # before groups are destroyed


def test_models_whose_blocks_cannot_run_twice_are_refused_on_all_ranks() -> None:
    run_ranks(2, refuse)
