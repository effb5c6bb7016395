"""Gradients are clipped by the norm of the whole model, as ``torch.nn.utils.clip_grad_norm_`` does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from colossal_hetero import HeteroHybridParallelPlugin
from tests.support.checkpoints import read_weights
from tests.support.harness import run_ranks
from tests.support.language_models import MODELS
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import tiny_vit

SAMPLES = 4
VOCABULARY = 101
MAX_NORM = 0.05
"""Far below the norm of the gradients, so that they are clipped."""


def make(name: str) -> nn.Module:
    return tiny_vit() if name == "vit" else MODELS[name]()


def global_batch(name: str) -> tuple[Any, ...] | dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        return torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.arange(SAMPLES)
    ids = torch.randint(VOCABULARY, (SAMPLES, 12), generator=generator)
    return dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))


def loss_of(output: Any, inputs: Any) -> Tensor:
    return nn.functional.cross_entropy(output.float(), inputs[1]) if isinstance(output, Tensor) else output.loss


def run_model(model: nn.Module, inputs: Any) -> Tensor:
    return loss_of(model(**inputs) if isinstance(inputs, dict) else model(inputs[0]), inputs)


def train_alone(name: str) -> tuple[float, dict[str, Tensor]]:
    """The norm of the gradients before clipping, and the clipped change of all weights, in one process."""
    model = make(name)
    run_model(model, global_batch(name)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    return norm, {key: -weight.grad for key, weight in model.named_parameters() if weight.grad is not None}


def train(own: bool, name: str, options: dict[str, Any], folder: Path) -> float:
    """Take one step of SGD with learning rate 1, and save the model. Returns the norm that was clipped by."""
    plugin = (HybridParallelPlugin if own else HeteroHybridParallelPlugin)(**options, max_norm=MAX_NORM)
    booster = Booster(plugin=plugin)
    model = make(name)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    share = SAMPLES // plugin.dp_size
    samples = slice(dist.get_rank(plugin.dp_group) * share, (dist.get_rank(plugin.dp_group) + 1) * share)
    inputs = tree_map(lambda tensor: tensor[samples], global_batch(name))
    if plugin.pp_size > 1:
        booster.execute_pipeline(iter([inputs]), model, loss_of, optimizer)
    else:
        booster.backward(run_model(model, inputs), optimizer)
    optimizer.step()
    booster.save_model(model, str(folder), shard=True)
    return float(optimizer.get_grad_norm()) / options.get(
        "initial_scale", 1
    )  # in fp16 it is the norm of scaled gradients


def check(own: bool, name: str, ranks: int, options: dict[str, Any], folder: Path) -> None:
    expected, change = train_alone(name)
    assert expected > 10 * MAX_NORM
    norms = run_ranks(ranks, train, own, name, options, folder)
    is_exact = options["precision"] == "fp32"
    assert norms == pytest.approx([expected] * ranks, rel=1e-5 if is_exact else 4e-3)
    if is_exact:
        initial, trained = make(name).state_dict(), read_weights(folder)
        error = torch.stack([(trained[key] - initial[key] - change[key]).norm() for key in change]).norm()
        assert error <= 1e-3 * MAX_NORM


PIPELINE = dict(pp_size=2, num_microbatches=2)
ZERO = dict(zero_stage=1, precision="bf16")
FP32, BF16, FP16 = (dict(precision=each) for each in ("fp32", "bf16", "fp16"))


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tp_size=2, pp_size=1, **FP32)),
    "pp2": (2, dict(tp_size=1, **PIPELINE, **FP32)),
    "tp2-pp2": (4, dict(tp_size=2, **PIPELINE, **FP32)),
    "tp2-dp2": (4, dict(tp_size=2, pp_size=1, **FP32)),
    "tp2-bf16": (2, dict(tp_size=2, pp_size=1, **BF16)),
    "tp2-fp16": (2, dict(tp_size=2, pp_size=1, **FP16, initial_scale=2**6)),
    "tp2-zero1": (2, dict(tp_size=2, pp_size=1, **ZERO)),
    "dp2-zero1": (2, dict(tp_size=1, pp_size=1, **ZERO)),
    "tp2-dp2-zero1": (4, dict(tp_size=2, pp_size=1, **ZERO)),
    "pp2-zero1": (2, dict(tp_size=1, **PIPELINE, **ZERO)),
    "pp2-dp2-zero1": (4, dict(tp_size=1, **PIPELINE, **ZERO)),
    "tp2-pp2-zero1": (4, dict(tp_size=2, **PIPELINE, **ZERO)),
}

MODELS_AND_CASES = [
    (name, case)
    for name in ("gpt2", "llama", "vit")
    for case, (ranks, _) in CASES.items()
    # GPT-2 has fused layers, and a weight that two stages share.
    if name == "gpt2" or ranks == 2 or IS_THOROUGH
]


@pytest.mark.parametrize("name, case", MODELS_AND_CASES)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(name: str, case: str, tmp_path: Path) -> None:
    check(False, name, *CASES[case], tmp_path)


def test_colossalais_plugin_clips_by_it_too(tmp_path: Path) -> None:
    check(True, "gpt2", 2, dict(tp_size=2, pp_size=1, precision="fp32"), tmp_path)
