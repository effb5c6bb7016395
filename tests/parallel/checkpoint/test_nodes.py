"""Damaged checkpoints: layers come from other nodes, and the newest whole checkpoint is loaded, in words."""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint.places import Place, entries
from tests.support.checkpoint_runs import Run, boosted, different_tensors, gathered, hybrid, saving, train
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH

STEP = "step-00000001"
DAMAGED = ("block-0002.whole.safetensors", "states.bin")


def on_two_nodes(folder: Path, shared: bool = False, **options: Any) -> Run:
    """A run whose first half of the ranks is on node a and whose second half is on node b."""
    node = "ab"[2 * dist.get_rank() // dist.get_world_size()]
    config = CheckpointConfig(local=folder / node, shared=folder / "shared" if shared else None, node=node)
    return boosted("gpt2", hybrid(**options, checkpoints=config))


def save(folder: Path, options: dict[str, Any], shared: bool = False) -> Any:
    run = on_two_nodes(folder, shared, **options)
    train(run, [0])
    run.plugin.save(run.model, run.optimizer, step=1)
    run.plugin.wait_for_saves()
    dist.barrier()
    return gathered(run)


def check_other_plans(folder: Path, saved_in: dict[str, Any], loaded_in: Sequence[dict[str, Any]]) -> list[int]:
    """Bytes that this rank has received, for each plan."""
    saved, received = save(folder, saved_in), []
    for options in loaded_in:
        run = on_two_nodes(folder, **options)
        start = run.plugin.resume(run.model, run.optimizer)
        assert different_tensors(gathered(run), saved) == []
        needed = sum(piece.data.numel() * piece.data.element_size() for piece in run.pieces)
        assert start.read_bytes + start.received_bytes >= needed
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (start.read_bytes, needed))
        assert sum(read for read, _ in everyone) <= sum(needed for _, needed in everyone)
        received.append(start.received_bytes)
    return received


def test_layers_come_from_the_node_that_has_them(tmp_path: Path) -> None:
    """Node a has the first stage and node b the second. Then both need all layers; or exactly those that they have."""
    plans = dict(tp_size=2, pp_size=2), [dict(tp_size=4), dict(pp_size=4), dict(tp_size=2, pp_size=2)]
    received = run_ranks(4, check_other_plans, tmp_path, *plans)
    assert all(of_rank[0] > 0 and of_rank[2] == 0 for of_rank in received)
    # Four stages on two nodes need the same layers as two, except that the last stage needs the tied embedding, which
    # node b has as well.
    assert [of_rank[1] for of_rank in received] == [0, 0, 0, 0]


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def check_damage(folder: Path, shared: bool, damage: Callable[[Path], None]) -> int:
    saved = save(folder, {}, shared)
    before: dict[str, bytes] = {}
    if dist.get_rank() == 0:
        for name in DAMAGED:
            path = folder / "a" / STEP / name
            before[name] = path.read_bytes()
            damage(path)
    dist.barrier()
    run = on_two_nodes(folder, shared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = run.plugin.resume(run.model, run.optimizer)
    assert different_tensors(gathered(run), saved) == []
    found = [str(each.message) for each in caught if "a checkpoint is damaged" in str(each.message)]
    assert bool(found) == (dist.get_rank() == 0)
    for name, content in before.items():
        assert (folder / "a" / STEP / name).read_bytes() == content
        assert any(name in message and "the damaged file was replaced" in message for message in found), found
    assert len(list((folder / "a" / STEP).iterdir())) == len(list((folder / "b" / STEP).iterdir()))
    return start.received_bytes


def check_damages(folder: Path) -> list[int]:
    """Bytes that this rank has received in each case."""
    return [
        check_damage(folder / f"{damage.__name__}-{shared}", shared, damage) for damage, shared in DAMAGES_AND_FOLDERS
    ]


DAMAGES_AND_FOLDERS = [
    (damage, shared)
    for damage, shared in itertools.product([flipped, cut_off, Path.unlink], [False, True])
    if IS_THOROUGH or damage is flipped or shared == (damage is cut_off)
]


def test_a_damaged_file_is_replaced_by_that_of_another_node_or_the_shared_folder(tmp_path: Path) -> None:
    own, other = run_ranks(2, check_damages, tmp_path)
    assert [received > 0 for received in own] == [
        not shared or damage is not flipped for damage, shared in DAMAGES_AND_FOLDERS
    ]
    assert other == [0] * len(DAMAGES_AND_FOLDERS)


def check_rest(folder: Path) -> tuple[list[list[str]], str]:
    """What a full disk says, without and with a shared folder; and what is said of a lost node."""
    full: list[list[str]] = []

    def replace(place: Place, file: str, content: Iterable[memoryview]) -> None:
        next(iter(content))
        raise OSError("no space left")

    for shared in (False, True):
        root = folder / f"full-{shared}"
        save(root, {}, shared)
        if dist.get_rank() == 0:
            flipped(root / "a" / STEP / DAMAGED[0])
        dist.barrier()
        run = on_two_nodes(root, shared)
        with patch.object(Place, "replace", replace), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.plugin.resume(run.model, run.optimizer)
        full.append([str(each.message) for each in caught if "replaced" in str(each.message)])

    save(folder / "lost", dict(pp_size=2))
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "lost" / "b")
    dist.barrier()
    run = on_two_nodes(folder / "lost")
    with pytest.raises(RuntimeError) as lost:
        run.plugin.resume(run.model, run.optimizer)

    save(root := folder / "states", {})
    (root / "ab"[dist.get_rank()] / STEP / "states.bin").unlink()
    dist.barrier()
    run = on_two_nodes(root)
    with pytest.raises(RuntimeError, match=r"that of step 1 lacks states\.bin"):
        run.plugin.resume(run.model, run.optimizer)
    (entry,) = entries(root / "a")
    assert len(entry.faults) == 1 and "states.bin is missing" in entry.faults[0]
    assert run.plugin._checkpoints.files.newest_step() is None
    return full, str(lost.value)


def test_what_cannot_be_replaced_or_loaded(tmp_path: Path) -> None:
    """A full disk does not stop the run; layers that are lost are named; without its states, no checkpoint is whole."""
    first, second = run_ranks(2, check_rest, tmp_path)
    assert all("could not be replaced by that of node b: no space left" in own[-1] for own in first[0])
    assert second[0] == [[], []]
    for _, message in (first, second):
        assert "no checkpoint is whole" in message
        assert "that of step 1 lacks block-0002.whole.safetensors and" in message and "node a" in message


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 3, 2 * len(content) // 3):
        content[place] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_unreadable(path: Path) -> None:
    """Also for root, who may read everything: a folder in place of the file, of the same size for ``stat``."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGES = [flip, halve, empty, Path.unlink, make_unreadable]
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
