"""Checkpoints are interchangeable with Colossal-AI's plugin while columns are pruned, and while work migrates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance import BalancePlan
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.harness import run_ranks
from tests.support.migration_runs import assert_equal, migrating_run, reference_run
from tests.support.training import Trained, assert_same_parameters, batch, boost, ours, sgd, tiny_vit, train

RESIZE = BalanceConfig(
    mode="resize",
    warmup_iterations=10**6,
    pruning=Pruning(resizing="column", priority="priority", imputation="same", priority_interval=2),
)
PIPELINE = dict(tp_size=2, pp_size=2, num_microbatches=3)


def start(method: str, seed: int = 0, idle: bool = False, **options: Any) -> Trained:
    """A run in which the last rank of the last stage prunes or gives work away, unless it is ``idle``."""
    model = tiny_vit(seed, depth=options.get("pp_size", 1))
    if method != "resize":
        return migrating_run(method, () if idle else dist.get_world_size() - 1, model, **options)
    run = boost(ours(RESIZE, **options), model, sgd)
    if not idle:
        run.plugin.balancer.follow(BalancePlan.resizing((0.0, 0.75)))
    return run


def check_interchange(folder: Path, method: str, options: dict[str, Any], sharded: bool) -> None:
    run = start(method, **options)
    plan = run.plugin.balancer.plan
    train(run, 2)
    saved = run.parameters
    save_checkpoint(run, folder / "ours", sharded)
    for source in ("ours", "theirs"):
        # Each checkpoint is loaded into models that start from other weights.
        model = tiny_vit(seed=5, depth=options.get("pp_size", 1))
        plain = load_checkpoint(reference_run(model, **options), folder / source, sharded)
        idle = load_checkpoint(start(method, seed=6, idle=True, **options), folder / source, sharded)
        if source == "ours":
            assert_same_parameters(plain.parameters, saved, "Colossal-AI's plugin with our checkpoint")
        else:
            # Our run loads it while its plan applies, in the middle of an iteration.
            if run.plugin.pp_size == 1:
                run.model(batch(77)[0])
            load_checkpoint(run, folder / source, sharded)
            assert_same_parameters(run.parameters, plain.parameters, "loaded while the plan applies")
        assert_same_parameters(idle.parameters, plain.parameters, f"our plugin with the checkpoint {source}")
        for each in (run, plain, idle):
            each.losses.clear()
            train(each, 2)
        assert idle.losses == plain.losses
        assert_same_parameters(idle.parameters, plain.parameters, f"training continued from the checkpoint {source}")
        if method != "resize":
            assert_equal(run, plain, f"after saving or loading {source}")
        if source == "ours":
            save_checkpoint(plain, folder / "theirs", sharded)
    assert run.plugin.balancer.plan == plan
    if not sharded:
        alone = tiny_vit(seed=8, depth=1).eval()
        alone.load_state_dict(torch.load(folder / "ours" / "model.pt", weights_only=True))
        load_checkpoint(idle, folder / "ours", sharded)
        idle.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(idle.model(batch()[0]), alone(batch()[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "options", "sharded"),
    [
        ("resize", dict(tp_size=2, precision="bf16"), True),
        ("broadcast-reduce", dict(tp_size=2), False),
        ("block", PIPELINE, True),
    ],
)
def test_checkpoints_are_interchangeable(method: str, options: dict[str, Any], sharded: bool, tmp_path: Path) -> None:
    run_ranks(2 * options.get("pp_size", 1), check_interchange, tmp_path, method, options, sharded)
