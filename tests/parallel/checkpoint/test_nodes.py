"""Damaged checkpoints: layers come from other nodes, and the newest whole checkpoint is loaded, in words."""

import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint.places import Place, entries
from tests.support.checkpoint_runs import Run, boosted, different_tensors, gathered, hybrid, saving, train
from tests.support.checks import of_all_ranks, on

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


@on(4)
def layers_come_from_the_node_that_has_them(folder: Path) -> None:
    saved, received = save(folder, dict(tp_size=2, pp_size=2)), []
    for options in (dict(tp_size=4), dict(pp_size=4), dict(tp_size=2, pp_size=2)):
        run = on_two_nodes(folder, **options)
        start = run.plugin.resume(run.model, run.optimizer)
        assert different_tensors(gathered(run), saved) == []
        needed = sum(piece.data.numel() * piece.data.element_size() for piece in run.pieces)
        assert start.read_bytes + start.received_bytes >= needed
        everyone = of_all_ranks((start.read_bytes, needed))
        assert sum(read for read, _ in everyone) <= sum(needed for _, needed in everyone)
        received.append(start.received_bytes)
    # Four stages on two nodes need the same layers as two, except that the last stage needs the tied embedding, which
    # node b has as well.
    assert received[0] > 0 and received[1:] == [0, 0]


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@on(2, False, flipped)
@on(2, True, flipped)
@on(2, True, cut_off)
@on(2, False, Path.unlink)
def a_damaged_file_is_replaced_by_that_of_another_node_or_the_shared_folder(
    shared: bool, damage: Callable[[Path], None], folder: Path
) -> None:
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
    receives = dist.get_rank() == 0 and (not shared or damage is not flipped)
    assert (start.received_bytes > 0) == receives


@on(2)
def a_full_disk_does_not_stop_the_run(folder: Path) -> None:
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
        said = [str(each.message) for each in caught if "replaced" in str(each.message)]
        assert bool(said) == (dist.get_rank() == 0)
        assert not said or "could not be replaced by that of node b: no space left" in said[-1]


@on(2)
def layers_that_are_lost_are_named_and_without_its_states_no_checkpoint_is_whole(folder: Path) -> None:
    save(folder / "lost", dict(pp_size=2))
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "lost" / "b")
    dist.barrier()
    run = on_two_nodes(folder / "lost")
    words = r"no checkpoint is whole.*that of step 1 lacks block-0002\.whole\.safetensors and.*node a"
    with pytest.raises(RuntimeError, match=words):
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


def make_unreadable(path: Path) -> None:
    """Also for root, who may read everything: a folder in place of the file, of the same size for ``stat``."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


FALLBACKS: list[tuple[Callable[[Path], None], str]] = [
    (cut_off, "block-0001*.safetensors"),
    (Path.unlink, "states.bin"),
    (flipped, "manifest.json"),
    (make_unreadable, "part-*.json"),
]


@on(2)
def the_newest_whole_checkpoint_is_loaded(folder: Path) -> None:
    run = boosted("vit", saving(folder / "saved"))
    for step in (1, 2):
        train(run, [step])
        run.plugin.save(run.model, run.optimizer, step=step)
        run.plugin.wait_for_saves()
        if step == 1:
            expected = gathered(run)
    for damage, name in FALLBACKS:
        copy = folder / damage.__name__
        if dist.get_rank() == 0:
            shutil.copytree(folder / "saved", copy)
            damage(next((copy / "step-00000002").glob(name)))
        dist.barrier()
        resumed = boosted("vit", saving(copy))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert resumed.plugin.resume(resumed.model, resumed.optimizer).step == 1, name
        assert different_tensors(gathered(resumed), expected) == [], name
        said = [str(each.message) for each in caught if "a newer checkpoint is not whole" in str(each.message)]
        assert len(said) == (dist.get_rank() == 0), (name, said)
        for words in said:
            assert "that of step 2" in words and "Training continues from that of step 1" in words, words
