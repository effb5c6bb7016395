"""Reading: which checkpoint is loaded, bitwise what was saved, only what is needed, other copies of damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colossal_hetero.checkpoint.config import CheckpointError
from colossal_hetero.checkpoint.pieces import Box, TensorPiece
from colossal_hetero.checkpoint.places import NodeCopy, Place, find_checkpoints, newest_whole
from colossal_hetero.checkpoint.storage import DamagedCopy
from tests.support.layer_checkpoints import assert_loads, newest_step, reader_of, save_steps, tensors
from tests.support.random_examples import IS_THOROUGH

STEP, BLOCK = "step-00000020", "block-0001.tp0of1.safetensors"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A local and a shared folder, each with steps 10 and 20."""
    local, shared = tmp_path / "local", tmp_path / "shared"
    save_steps(tmp_path, 10, 20, local=local, shared=shared)
    return local, shared


def flip(file: Path, key: str = "param.blocks.1.up") -> None:
    content = bytearray(file.read_bytes())
    stored = tensors(20)[key].view(-1).view(torch.uint8).numpy().tobytes()
    content[content.index(stored) + len(stored) // 2] ^= 16
    file.write_bytes(content)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


DAMAGES = {"flipped": (flip, "check sum"), "cut off": (cut_off, "bytes instead of"), "gone": (Path.unlink, "missing")}


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_every_division_loads_and_reads_no_box_twice(folders: tuple[Path, Path], degree: int) -> None:
    for rank in range(degree):
        reader = reader_of(*folders)
        assert_loads(reader, degree, rank)
        assert reader.bytes_read == sum(tensor.nbytes for tensor in tensors(20).values())
        assert reader.problems == []


def test_every_changed_byte_of_a_box_is_noticed(tmp_path: Path) -> None:
    save_steps(tmp_path, 20)
    (copy,) = find_checkpoints([Place(tmp_path)]).checkpoints[0].copies
    file = tmp_path / STEP / BLOCK
    original = file.read_bytes()
    items = copy.files[BLOCK].items
    assert sum(item.bytes for item in items) == len(original) - 8 - int.from_bytes(original[:8], "little")
    for item in items:
        for changed in range(item.start, item.start + item.bytes, 1 if IS_THOROUGH else 7):
            content = bytearray(original)
            content[changed] ^= 1 << changed % 8
            file.write_bytes(content)
            with pytest.raises(DamagedCopy, match=f"{BLOCK} is damaged: the check sum of elements"):
                copy.item(BLOCK, item)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_read_from_another_copy_and_replaced(folders: tuple[Path, Path], damage: str) -> None:
    local, shared = folders
    harm, word = DAMAGES[damage]
    harm(local / STEP / BLOCK)
    reader = reader_of(local, shared)
    assert_loads(reader)
    (problem,) = reader.problems
    assert BLOCK in problem and word in problem
    ((bad, name),) = reader.damaged()
    good = reader.whole(name, bad.check(name))
    assert name == BLOCK and bad.place.name == str(local) and good is not None and good.place.name == str(shared)
    assert reader.replace(bad, name, good.content(name), "the shared folder")
    assert "the damaged file was replaced by that of the shared folder" in reader.problems[-1]
    assert reader.damaged() == []
    assert_loads(reader_of(local, step=20))


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_another_copy_the_error_names_the_file_and_a_complete_checkpoint(
    folders: tuple[Path, Path], damage: str
) -> None:
    local, shared = folders
    harm, word = DAMAGES[damage]
    harm(local / STEP / BLOCK)
    harm(shared / STEP / BLOCK)
    with pytest.raises(CheckpointError) as error:
        assert_loads(reader_of(local, shared, step=20))
    for text in (f"{local}/{STEP}/{BLOCK}", f"{shared}/{STEP}/{BLOCK}", word, "the checkpoint of step 10 is complete"):
        assert text in str(error.value)
    assert_loads(reader_of(local, shared, step=20), layers="block-0000")  # what is not damaged still loads


def test_damaged_indices_and_torn_checkpoints_are_noticed(folders: tuple[Path, Path]) -> None:
    local, shared = folders
    manifest, part = local / STEP / "manifest.json", local / STEP / "part-a.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"epoch": 0', '"epoch": 8'))
    search = find_checkpoints([Place(local)])
    assert search.newest().step == 10
    assert "check sum differs" in search.torn[f"{local}/{STEP}"]
    assert_loads(reader_of(local, shared, step=20))
    manifest.write_text(text)
    part.write_text(part.read_text().replace('"start":', '"start":1', 1))
    assert newest_step(local) == 10
    assert_loads(reader_of(local, shared, step=20))
    (shared / STEP / BLOCK).unlink()
    assert newest_step(shared) == 10
    manifest.unlink()
    assert newest_step(local) == 10
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 20; there are: 10; .*it has no manifest.json"):
        assert_loads(reader_of(local, step=20))


def test_checkpoints_of_one_step_from_two_runs_are_not_mixed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    save_steps(old, 20, run="first")
    save_steps(new, 20, run="second")
    (new / STEP / BLOCK).unlink()
    with pytest.raises(CheckpointError, match="no other copy"):
        assert_loads(reader_of(new, old, step=20))


def test_what_cannot_be_loaded_is_said(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*: there is no folder of a checkpoint"):
        newest_step(tmp_path / "nothing")
    reader = reader_of(folders[0])

    def piece(key: str, shape: tuple[int, ...], dtype: torch.dtype, box: Box) -> TensorPiece:
        return TensorPiece("x", key, shape, box, torch.empty(box.sizes, dtype=dtype), "y")

    with pytest.raises(CheckpointError, match=r"the checkpoint of step 20 has no param\.other"):
        reader.load([piece("param.other", (2,), torch.float32, Box((0,), (2,)))])
    with pytest.raises(ValueError, match=r"param.scale was saved as bfloat16 \[\], .* into float32 \[\]"):
        reader.load([piece("param.scale", (), torch.float32, Box((), ()))])
    with pytest.raises(CheckpointError, match=r"lacks elements \(12,\) to \+\(1,\) of param\.blocks\.0\.norm"):
        reader.load([piece("param.blocks.0.norm", (12,), torch.bfloat16, Box((0,), (13,)))])


FILES = frozenset({"embedding.whole.safetensors", "block-0000.whole.safetensors"})
FIRST, SECOND = sorted(FILES)


def copy(node: str, step: int, *files: str, run: str = "") -> NodeCopy:
    return NodeCopy(node, f"{run}{step}", step, f"2026-01-01T00:00:{step:02}", frozenset(files), FILES)


def test_the_newest_checkpoint_whose_files_are_all_somewhere_is_loaded() -> None:
    copies = [copy("a", 1, *FILES), copy("a", 2, FIRST), copy("b", 2, SECOND), copy("a", 3, FIRST), copy("b", 3)]
    found, skipped = newest_whole([*copies, *copies])  # two ranks of each node find the same
    assert found == copies[1:3]
    assert skipped == [f"that of step 3 lacks {SECOND} (parts of it are on node a, node b)"]

    # A step can be chosen, and parts of different runs are not put together.
    copies = [copy("a", 1, *FILES), copy("", 2, *FILES), copy("a", 3, FIRST)]
    assert newest_whole(copies, step=1) == (copies[:1], [])
    with pytest.raises(FileNotFoundError, match="there is none of step 4; the steps are: 1, 2, 3"):
        newest_whole(copies, step=4)
    with pytest.raises(FileNotFoundError, match="no checkpoint is whole: that of step 1 lacks"):
        newest_whole([copy("a", 1, FIRST, run="x"), copy("b", 1, SECOND, run="y")])
    assert newest_whole([]) == ([], [])
