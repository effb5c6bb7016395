"""Colossal-AI's own plugin trains on a CPU as one process does, which this package's corrections make possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from torch import Tensor

from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.harness import run_ranks
from tests.support.language_models import MODELS
from tests.support.training import Trained, boost, mean_over_replicas, pipeline_step, sgd, theirs, train_alone

BATCH = 4
Case = tuple[str, dict[str, Any], float]
"""Model, arguments of the plugin, and the relative tolerance of losses."""
CASES: dict[int, list[Case]] = {
    2: [
        ("llama", dict(tp_size=1, pp_size=2, num_microbatches=4, num_layers_per_stage=[1, 3]), 1e-5),
        ("llama", dict(tp_size=2, precision="fp16", initial_scale=2**8), 5e-3),
        ("llama", dict(tp_size=1, zero_stage=2, precision="bf16"), 5e-3),
    ],
    4: [
        ("gpt2", dict(tp_size=2, pp_size=2, num_microbatches=4), 1e-5),
    ],
}


def make_model(name: str) -> torch.nn.Module:
    return MODELS[name](use_cache=False, **({"num_hidden_layers": 4} if name == "llama" else {"n_layer": 4}))


def batch(number: int) -> dict[str, Tensor]:
    ids = torch.randint(101, (BATCH, 12), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def step(run: Trained, number: int) -> float:
    """Train on the global batch with this number; its loss."""
    plugin, share = run.plugin, BATCH // run.plugin.dp_size
    first = dist.get_rank(plugin.dp_group) * share
    mine = {key: value[first : first + share] for key, value in batch(number).items()}
    if plugin.pp_size > 1:
        own = pipeline_step(run, iter([mine]), lambda outputs, _: outputs.loss)
        assert p2p.dist.batch_isend_irecv.__self__.kept == 0  # no message is kept for longer than a step
        return mean_over_replicas(own, share)
    loss = run.model(**mine).loss
    run.booster.backward(loss, run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return mean_over_replicas(loss.item(), share)


def train_and_resume(cases: list[Case], folder: Path) -> list[list[float]]:
    """The losses of three steps. Before the last one, a new run loads a checkpoint, and must continue alike."""
    found = []
    for number, (name, options, _) in enumerate(cases):
        runs = [boost(theirs(custom_policy=None, **options), make_model(name), sgd) for _ in range(2)]
        losses = [step(runs[0], each) for each in (0, 1)]
        save_checkpoint(runs[0], folder / str(number), sharded=number % 2 == 0)
        losses.append(step(runs[0], 2))
        load_checkpoint(runs[1], folder / str(number), sharded=number % 2 == 0)
        # With ZeRO, the checkpoint holds the half-precision weights; fp32 master weights are rebuilt from them.
        assert step(runs[1], 2) == pytest.approx(losses[-1], rel=5e-3 if "precision" in options else 0)
        found.append(losses)
    return found


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")
@pytest.mark.parametrize("ranks", CASES)
def test_training_equals_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    expected = {}
    for name in MODELS:
        model, batches = make_model(name), map(batch, range(3))
        expected[name] = train_alone(model, sgd(model), batches, lambda model, batch: model(**batch).loss)
    for found in run_ranks(ranks, train_and_resume, CASES[ranks], tmp_path):
        for (name, options, tolerance), losses in zip(CASES[ranks], found, strict=True):
            assert losses == pytest.approx(expected[name], rel=tolerance), (name, options)
