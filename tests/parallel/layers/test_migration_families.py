"""Each model family of Colossal-AI has the loss and gradients of its unsharded model, also while one rank migrates."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.host_messages import Exchange
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.balance.resharding import Resharding
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.block import attach_blocks
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI
from colossal_hetero.layers.transport import Transport
from colossal_hetero.layers.unit_mover import StateSlot
from tests.support.harness import run_ranks
from tests.support.model_families import (
    BUILDERS,
    SHARDING_OPTIONS,
    UNLIKE_THE_UNSHARDED_MODEL,
    allow_cpu,
    family_loss,
)
from tests.support.random_examples import IS_THOROUGH
from tests.support.sharding import (
    Prepare,
    assert_same_as_colossalai,
    assert_same_as_unsharded,
    parallel_layer_counts,
    randomize,
)

LOOSE = dict(
    bert=1, gpt2=1, gptj=1, llama=1, mistral=1, mixtral=3, qwen2=1, qwen3=1, cohere=1, opt=1, bloom=5, falcon=1, t5=25
)
LOOSE |= dict(falcon_alibi=5, vit=1, whisper=1, sam=32, blip2=1)
"""How many layers of each family are in no block: heads, single layers, attention with a bias per head (T5, BLOOM,
Falcon with ALiBi, SAM)."""


def _layers(columns: int, rows: int, head: int = 1, **fused: int) -> dict[str, int]:
    names = dict(HeteroLinear1D_Col=columns, HeteroLinear1D_Row=rows)
    names |= {f"HeteroFusedLinear1D_{kind}": count for kind, count in fused.items()}
    names |= dict(HeteroVocabParallelLMHead1D=head)
    return {name: count for name, count in names.items() if count}


PARALLEL_LAYERS: dict[str, dict[str, int]] = {
    "bert": _layers(8, 4),
    "gpt2": {
        "HeteroGPT2FusedLinearConv1D_Col": 4,
        "HeteroGPT2FusedLinearConv1D_Row": 4,
        "HeteroVocabParallelLMHead1D": 1,
    },
    "gptj": _layers(8, 4),
    "llama": _layers(10, 4),
    "mistral": _layers(10, 4),
    "mixtral": _layers(9, 2, head=0),
    "qwen2": _layers(11, 4, head=0),
    "qwen3": _layers(10, 4),
    "cohere": _layers(10, 4),
    "opt": _layers(8, 4),
    "bloom": _layers(4, 4),
    "falcon": _layers(4, 4),
    "falcon_alibi": _layers(4, 4),
    "t5": _layers(22, 10),
    "vit": _layers(9, 4, head=0),
    "whisper": _layers(22, 10),
    "sam": _layers(25, 13, head=0, Col=2),
    "blip2": _layers(24, 14, Col=2),
}
"""How many of Colossal-AI's layers this package's layers replace in the model of each family."""
if IS_NEWER_THAN_COLOSSALAI:
    PARALLEL_LAYERS |= dict(qwen2=_layers(10, 4), vit=_layers(8, 4, head=0))
    LOOSE["vit"] = 0

METHODS = ("broadcast-reduce", "scatter-gather", "block")


class NoOptimizer:
    """Nothing is kept of parameters."""

    obstacle = None

    def prepare(self) -> None: ...

    def slots_of(self, parameter: torch.Tensor) -> list[StateSlot]:
        return []


class Migration:
    """Changes the plan of a sharded model before each run: block form, a column form, and units moved for good."""

    def __init__(self, number: int) -> None:
        self.loose = 0
        """Number of layers that are in no block."""
        self.immovable = 0
        """Number of blocks of one unit, which cannot be divided."""
        self._number = number
        self._method = ""
        self._applier: Applier | None = None
        self._transport: Transport | None = None
        self._resharding: Resharding | None = None

    def cases(self) -> Iterator[Prepare]:
        yield lambda model: None
        column_forms = (
            product(METHODS[:2], (0, 1)) if IS_THOROUGH else [(METHODS[self._number % 2], self._number % 4 // 2)]
        )
        for method, sender in column_forms:
            yield partial(self._migrate, method, sender)
        for sender in (0, 1) if IS_THOROUGH else (1 - self._number % 2,):
            yield partial(self._migrate, "block", sender)
        yield partial(self._migrate, "block", self._number % 2, for_good=True)

    def finish(self) -> None:
        """Assert that this rank sent messages since the plan was changed."""
        assert self._transport is not None
        assert sum(sent.messages for sent in self._transport.sent.values()) > 0, f"{self._method} sent nothing"

    def _migrate(self, method: str, sender: int, model: nn.Module, for_good: bool = False) -> Callable[[], None] | None:
        """Returns what gives all ranks their own units again, with their gradients, if units are moved for good."""
        if self._applier is not None:
            self._applier.end_iteration()
            self.finish()
        if method != self._method:
            self._attach(method, model)
        assert self._applier is not None and self._transport is not None
        shares = (0.5, 0.0) if sender == 0 else (0.0, 0.5)
        self._transport.reset()
        self._applier.apply(BalancePlan(resize=(0.0, 0.0), migrate=shares, receive=shares[::-1]), for_good)
        if not for_good:
            self._transport.reset()
        self._applier.units.begin_pass()
        if not for_good:
            return None
        assert self._resharding is not None and self._resharding.is_active
        return partial(self._applier.apply, BalancePlan.idle(2))

    def _attach(self, method: str, model: nn.Module) -> None:
        """Let later runs migrate with ``method``."""
        if self._applier is not None:
            self._applier.apply(BalancePlan(resize=(0.0, 0.0), migrate=(0.0, 0.0), receive=(0.0, 0.0)))
        layers = hetero_layers(model)
        blocks = attach_blocks(model) if method == "block" else []
        self.loose = len(layers) - sum(len(block.layers) for block in blocks)
        self.immovable = sum(block.units == 1 for block in blocks)
        self._method, self._transport = method, Transport(dist.new_group([0, 1]))
        config = BalanceConfig(mode="migrate", migration=method)  # type: ignore[arg-type]
        self._resharding = None
        if blocks:
            exchange = Exchange(dist.new_group([0, 1]))
            self._resharding = Resharding(model, blocks, self._transport, exchange, NoOptimizer())
        self._applier = Applier(layers, blocks, config, 100, self._transport, resharding=self._resharding)


def _check(names: list[str]) -> dict[str, Any]:
    """For each family its parallel layers, ``loose`` layers and ``immovable`` blocks, or a traceback if it failed."""
    results: dict[str, Any] = {}
    allow_cpu()
    for number, name in enumerate(names):
        compare = assert_same_as_colossalai if name in UNLIKE_THE_UNSHARDED_MODEL else assert_same_as_unsharded
        try:
            torch.manual_seed(0)
            model, inputs = BUILDERS[name]()
            migration = Migration(number)
            options = SHARDING_OPTIONS.get(name, {})
            sharded = compare(randomize(model).train(), family_loss(inputs), migration.cases(), **options)
            migration.finish()
            results[name] = (parallel_layer_counts(sharded), migration.loose, migration.immovable)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def test_loss_and_gradients_equal_those_of_the_unsharded_model() -> None:
    """All families use the same two processes, to save time."""
    for rank, outcome in enumerate(run_ranks(2, _check, list(BUILDERS))):
        failures = {name: found for name, found in outcome.items() if found != (PARALLEL_LAYERS[name], LOOSE[name], 0)}
        assert not failures, "\n".join(f"{name}, rank {rank}:\n{found}" for name, found in failures.items())
