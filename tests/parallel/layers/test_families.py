"""Model families of Colossal-AI compute the same with this package's layers as without sharding.

Compared are the loss and every gradient of tiny models with random weights, in fp32, on two tensor-parallel ranks.
"""

from __future__ import annotations

import traceback
from typing import Any

import torch

from tests.support.harness import run_ranks
from tests.support.model_families import BUILDERS, SHARDING_OPTIONS, UNLIKE_THE_UNSHARDED_MODEL, allow_cpu, family_loss
from tests.support.sharding import assert_same_as_colossalai, assert_same_as_unsharded, parallel_layer_counts, randomize


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


def _check(names: list[str]) -> dict[str, Any]:
    """Return, for every family, the number of its parallel layers by class, or a traceback if it failed."""
    results: dict[str, Any] = {}
    allow_cpu()
    for name in names:
        compare = assert_same_as_colossalai if name in UNLIKE_THE_UNSHARDED_MODEL else assert_same_as_unsharded
        try:
            torch.manual_seed(0)
            model, inputs = BUILDERS[name]()
            sharded = compare(randomize(model).train(), family_loss(inputs), **SHARDING_OPTIONS.get(name, {}))
            results[name] = parallel_layer_counts(sharded)
        except Exception:
            results[name] = traceback.format_exc()
    return results


def test_loss_and_gradients_equal_those_of_the_unsharded_model() -> None:
    """All families use the same two processes, to save time."""
    for rank, outcome in enumerate(run_ranks(2, _check, list(BUILDERS))):
        failures = {name: found for name, found in outcome.items() if found != PARALLEL_LAYERS[name]}
        assert not failures, "\n".join(f"{name}, rank {rank}:\n{found}" for name, found in failures.items())
