"""Checkpoints are interchangeable: Colossal-AI's plugin loads those written while pruning, and ours loads its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from colossal_hetero import BalanceConfig, Pruning
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.harness import run_ranks
from tests.support.training import (
    assert_same_parameters,
    batch,
    boost,
    ours,
    scripted,
    theirs,
    tiny_vit,
    train,
)

RESIZE = BalanceConfig(
    mode="resize",
    pruning=Pruning(
        resizing="column", resize_overhead=0.0, priority="priority", imputation="same", priority_interval=2
    ),
)


def check_interchange(folder: Path, options: dict[str, Any], sharded: bool) -> None:
    with scripted(lambda rank, iteration: 4.0 if rank % 2 == 1 else 1.0):
        pruning = train(boost(ours(RESIZE, **options)), 8)
    assert pruning.plans[-1] == (0.0, pytest.approx(0.75))
    saved = pruning.parameters
    save_checkpoint(pruning, folder / "ours", sharded)

    # Each checkpoint is loaded into a model that starts from other weights.
    plain = load_checkpoint(boost(theirs(**options), tiny_vit(seed=5)), folder / "ours", sharded)
    assert_same_parameters(plain.parameters, saved, "Colossal-AI's plugin with our checkpoint")
    with scripted():
        again = load_checkpoint(boost(ours(RESIZE, **options), tiny_vit(seed=6)), folder / "ours", sharded)
    assert_same_parameters(again.parameters, saved, "our plugin with our checkpoint")
    for run in (plain, again):
        train(run, 3)
    assert again.losses == plain.losses
    assert_same_parameters(again.parameters, plain.parameters, "training continued from our checkpoint")

    save_checkpoint(plain, folder / "theirs", sharded)
    # A new model, because a checkpoint of half-precision training has no fp32 weights.
    plain = load_checkpoint(boost(theirs(**options), tiny_vit(seed=5)), folder / "theirs", sharded)
    with scripted():
        back = load_checkpoint(boost(ours(RESIZE, **options), tiny_vit(seed=7)), folder / "theirs", sharded)
    assert_same_parameters(back.parameters, plain.parameters, "our plugin with Colossal-AI's checkpoint")
    for run in (plain, back):
        train(run, 3)
    assert back.losses == plain.losses
    assert_same_parameters(back.parameters, plain.parameters, "training continued from Colossal-AI's checkpoint")

    # A model that is pruning can load a checkpoint too, and continues to prune.
    load_checkpoint(pruning, folder / "theirs", sharded)
    train(pruning, 2)
    assert pruning.plans[-1] == (0.0, pytest.approx(0.75))

    if not sharded:
        alone = tiny_vit(seed=8).eval()
        alone.load_state_dict(torch.load(folder / "ours" / "model.pt", weights_only=True))
        load_checkpoint(again, folder / "ours", sharded)
        again.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(again.model(batch()[0]), alone(batch()[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, sharded",
    [
        pytest.param(dict(tp_size=2), False, id="unsharded"),
        pytest.param(dict(tp_size=2, precision="bf16"), True, id="sharded-bf16"),
    ],
)
def test_checkpoints_are_interchangeable(options: dict[str, Any], sharded: bool, tmp_path: Path) -> None:
    run_ranks(2, check_interchange, tmp_path, options, sharded)
