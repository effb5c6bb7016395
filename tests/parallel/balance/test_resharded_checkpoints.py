"""Checkpoints saved while units are permanently re-sharded are ordinary ones, and ordinary ones can be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero import CheckpointConfig
from tests.support.checkpoints import load_checkpoint, save_checkpoint
from tests.support.harness import run_ranks
from tests.support.training import Trained, boost, theirs
from tests.support.uneven_runs import STEPS, adamw, small_vit, train, uneven_run

MORE = 2


def is_uneven(run: Trained) -> bool:
    weight = run.model.unwrap().blocks[0].mlp.fc1.weight
    return len(weight) != 60 // dist.get_world_size()


def assert_uneven(run: Trained) -> None:
    anywhere = torch.tensor(is_uneven(run), dtype=torch.int)
    dist.all_reduce(anywhere)
    assert anywhere > 0


def contents(folder: Path) -> dict[str, Any]:
    """All files of a checkpoint, by name; tensors in nested dictionaries."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            is_text = path.suffix == ".json"
            found[str(path.relative_to(folder))] = path.read_text() if is_text else torch.load(path, weights_only=True)
    return found


def assert_same(actual: Any, expected: Any, tolerance: float, where: str = "") -> None:
    """Assert that nested contents have the same keys, shapes, types and values."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same(actual[key], expected[key], tolerance, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for number, each in enumerate(expected):
            assert_same(actual[number], each, tolerance, f"{where}/{number}")
    elif isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), where
        assert tolerance or torch.equal(actual, expected), where
        assert float((actual.double() - expected.double()).abs().max()) <= tolerance, where
    else:
        assert actual == expected, where


def plain_run(seed: int = 0) -> Trained:
    """Colossal-AI's own plugin."""
    return boost(theirs(tp_size=dist.get_world_size(), max_norm=0.5), small_vit(seed), adamw)


def _save_and_load(straggler: int, folder: Path, forms: Sequence[bool]) -> None:
    run = uneven_run(straggler)
    train(run, STEPS)
    assert_uneven(run)
    for sharded in forms:
        save_checkpoint(run, folder / f"uneven {sharded}", sharded)
    assert_uneven(run)

    # The same weights and state after the units have been taken back.
    with run.plugin.balancer.ordinary_shards():
        assert not is_uneven(run)
        for sharded in forms:
            save_checkpoint(run, folder / f"even {sharded}", sharded)
    assert_uneven(run)

    plain = plain_run()
    train(plain, STEPS)
    for sharded in forms:
        save_checkpoint(plain, folder / f"plain {sharded}", sharded)
        # An ordinary run goes on from it as the uneven one does.
        resumed = load_checkpoint(plain_run(seed=3), folder / f"uneven {sharded}", sharded)
        resumed.losses = run.losses[:STEPS]
        train(resumed, MORE)
        if sharded:
            train(run, MORE)
        assert resumed.losses == pytest.approx(run.losses, rel=1e-10)

    # An uneven run loads an ordinary checkpoint.
    assert_uneven(run)
    load_checkpoint(run, folder / "plain True", True)
    assert_uneven(run)
    train(plain, MORE)
    run.losses = run.losses[:STEPS]
    train(run, MORE)
    assert run.losses == pytest.approx(plain.losses, rel=1e-10)


@pytest.mark.parametrize(("ranks", "straggler", "forms"), [(2, 1, (True, False)), (3, 0, (True,))])
def test_checkpoints_of_colossalais_format_are_ordinary(
    ranks: int, straggler: int, forms: Sequence[bool], tmp_path: Path
) -> None:
    """``forms``: whether a checkpoint is sharded."""
    run_ranks(ranks, _save_and_load, straggler, tmp_path, forms)
    for sharded in forms:
        found = contents(tmp_path / f"uneven {sharded}")
        assert_same(found, contents(tmp_path / f"even {sharded}"), 0.0)
        assert_same(found, contents(tmp_path / f"plain {sharded}"), 1e-10)


def _save_layers(folder: Path) -> dict[str, list[float]]:
    def start(straggler: int | None, seed: int) -> Trained:
        return uneven_run(straggler, seed=seed, checkpoints=CheckpointConfig(shared=folder, save_every=STEPS))

    run = start(0, 0)
    sent: list[int] = []

    def save(step: int) -> None:
        before = sum(found.messages for found in run.plugin.balancer.traffic.sent.values())
        run.plugin.save(run.model, run.optimizer, step=step + 1)
        sent.append(sum(found.messages for found in run.plugin.balancer.traffic.sent.values()) - before)

    train(run, STEPS + MORE, save)
    run.plugin.wait_for_saves()
    assert_uneven(run)
    # Units are taken back only for the step that is saved.
    assert sent[STEPS - 1] > 0 and sum(sent) == sent[STEPS - 1], sent
    losses = {"undisturbed": run.losses}
    for name, other in (("even", start(None, 3)), ("uneven", start(1, 4))):
        if name == "uneven":
            train(other, STEPS)
            assert_uneven(other)
        assert other.plugin.resume(other.model, other.optimizer).step == STEPS
        other.losses = run.losses[:STEPS]
        train(other, MORE)
        losses[name] = other.losses
    return losses


def test_layer_checkpoints_are_ordinary(tmp_path: Path) -> None:
    for losses in run_ranks(2, _save_layers, tmp_path):
        for name in ("even", "uneven"):
            assert losses[name] == pytest.approx(losses["undisturbed"], rel=1e-10), name


def _save_between_passes(folder: Path) -> list[float]:
    """The losses of a run that saves between a backward pass and the step, when gradients are there."""
    run = uneven_run(1)
    backward = run.booster.backward

    def save_and_step(loss: Tensor, optimizer: Any) -> None:
        backward(loss, optimizer)
        run.booster.save_model(run.model, str(folder), shard=True)

    train(run, STEPS)
    assert_uneven(run)
    run.booster.backward = save_and_step  # type: ignore[method-assign]
    train(run, MORE)
    return run.losses


def test_gradients_survive_a_save(tmp_path: Path) -> None:
    expected = run_ranks(2, _train_plainly)[0]
    for losses in run_ranks(2, _save_between_passes, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-10)


def _train_plainly() -> list[float]:
    run = plain_run()
    train(run, STEPS + MORE)
    return run.losses
