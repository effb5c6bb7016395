"""Checkpoints in a shared folder alone that are damaged: the newest whole one is loaded, in words."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.checkpoint_runs import boosted, different_tensors, gathered, saving, train
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 3, 2 * len(content) // 3):
        content[place] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_unreadable(path: Path) -> None:
    """Also for root, who may read everything: a folder in place of the file, of the same size for ``stat``."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGES = [flip, cut_off, empty, Path.unlink, make_unreadable]
FILES = ["block-0001*.safetensors", "states.bin", "manifest.json", "part-*.json"]


def check_fallback(folder: Path, cases: list[tuple[Callable[[Path], None], str]], **options: int) -> None:
    run = boosted("vit", saving(folder / "saved", **options))
    states = {}
    for step in (1, 2, 3):
        train(run, [step])
        run.plugin.save(run.model, run.optimizer, step=step)
        run.plugin.wait_for_saves()
        states[step] = gathered(run)
    for number, (damage, name) in enumerate(cases):
        every = ({3}, {3, 2}, {3, 2, 1})
        for damaged in every if IS_THOROUGH else (every[number % 3],):
            case, copy = f"{damage.__name__} {name} of {damaged}", folder / f"{number}-{len(damaged)}"
            if dist.get_rank() == 0:
                shutil.copytree(folder / "saved", copy)
                for step in damaged:
                    damage(next((copy / f"step-{step:08d}").glob(name)))
            dist.barrier()
            resumed = boosted("vit", saving(copy, **options))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if len(damaged) == 3:
                    with pytest.raises(RuntimeError) as error:
                        resumed.plugin.resume(resumed.model, resumed.optimizer)
                    assert "no checkpoint is whole" in str(error.value), case
                    continue
                start = resumed.plugin.resume(resumed.model, resumed.optimizer)
            expected = min(damaged) - 1
            assert start.step == expected, case
            assert different_tensors(gathered(resumed), states[expected]) == [], case
            said = [str(each.message) for each in caught if "a newer checkpoint is not whole" in str(each.message)]
            assert len(said) == (dist.get_rank() == 0), (case, said)
            for message in said:
                assert all(f"that of step {step}" in message for step in damaged), (case, message)
                assert f"Training continues from that of step {expected}" in message, (case, message)


@pytest.mark.parametrize("ranks", [2, 3] if IS_THOROUGH else [2])
def test_the_newest_whole_checkpoint_is_loaded(ranks: int, tmp_path: Path) -> None:
    """Each damage and each file; all pairs of them if thorough."""
    cases = [
        (damage, name)
        for number, damage in enumerate(DAMAGES)
        for other, name in enumerate(FILES)
        if IS_THOROUGH or (number - other) % len(FILES) == 0
    ]
    run_ranks(ranks, check_fallback, tmp_path, cases)
