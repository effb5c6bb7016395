"""Every model family of Colossal-AI equals its unsharded self while one of two ranks gives work to the other.

In column form all layers migrate; in block form the blocks that are found migrate, and other layers by their columns.
"""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.decide.plan import BalancePlan
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.block import attach_blocks
from colossal_hetero.layers.transport import Transport
from tests.parallel.layers.test_families import (
    BUILDERS,
    SHARDING_OPTIONS,
    UNLIKE_THE_UNSHARDED_MODEL,
    _help_on_a_cpu,
    _loss_of,
)
from tests.support.harness import run_ranks
from tests.support.sharding import assert_same_as_colossalai, assert_same_as_unsharded, randomize

LOOSE = dict(bert=0, gpt2=0, gptj=0, llama=0, mistral=0, mixtral=3, qwen2=1, cohere=0, opt=0, bloom=4, falcon=0, t5=24)
LOOSE |= dict(vit=1, whisper=0, sam=32, blip2=0)
"""How many layers of each family are in no block: attention with a bias per head (T5, BLOOM, SAM), single layers."""

Case = tuple[str, str, int]
"""Family, method to migrate, sender."""


def _prepare(model: nn.Module, method: str, sender: int, found: dict[str, int]) -> None:
    transport = Transport(dist.new_group([0, 1]))
    layers = hetero_layers(model)
    blocks = attach_blocks(model) if method == "block" else []
    found["loose"] = len(layers) - sum(len(block.layers) for block in blocks)
    found["immovable"] = sum(block.units == 1 for block in blocks)
    shares = (0.5, 0.0) if sender == 0 else (0.0, 0.5)
    applier = Applier(layers, blocks, BalanceConfig(mode="migrate", migration=method), 100, transport)
    applier.apply(BalancePlan(resize=(0.0, 0.0), migrate=shares, receive=shares[::-1]))
    applier.begin_iteration()


def _check(cases: list[Case]) -> dict[Case, Any]:
    """For every case what was found in the model, or the traceback of a failure."""
    results: dict[Case, Any] = {}
    _help_on_a_cpu()
    for name, method, sender in cases:
        compare = assert_same_as_colossalai if name in UNLIKE_THE_UNSHARDED_MODEL else assert_same_as_unsharded
        found: dict[str, int] = {}
        try:
            torch.manual_seed(0)
            model, inputs = BUILDERS[name]()
            compare(
                randomize(model).train(),
                _loss_of(inputs),
                lambda sharded, method=method, sender=sender, found=found: _prepare(sharded, method, sender, found),
                **SHARDING_OPTIONS.get(name, {}),
            )
            results[name, method, sender] = found
        except Exception:
            results[name, method, sender] = traceback.format_exc()
    return results


@pytest.mark.parametrize("name", BUILDERS)
def test_loss_and_gradients_equal_those_of_the_unsharded_model(name: str) -> None:
    cases = [(name, method, sender) for method in ("block", "broadcast-reduce", "scatter-gather") for sender in (0, 1)]
    for rank, outcome in enumerate(run_ranks(2, _check, cases)):
        for case, found in outcome.items():
            assert isinstance(found, dict), f"{case}, rank {rank}:\n{found}"
            if case[1] == "block":
                assert found == {"loose": LOOSE[name], "immovable": 0}, case
