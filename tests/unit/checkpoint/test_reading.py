"""Which rank writes and reads which file or box; which checkpoint is loaded, bitwise; other copies of damaged files."""

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.config import CheckpointError
from colossal_hetero.checkpoint.participants import Holding, spread
from colossal_hetero.checkpoint.pieces import Bitmap, Box, Location, StorageTier, TensorPiece
from colossal_hetero.checkpoint.places import NodeCopy, Place, find_checkpoints, newest_whole
from colossal_hetero.checkpoint.storage import DamagedCopy
from colossal_hetero.checkpoint.transfers import Fetch, Need, Read, choose_sources, layer_order, reads_and_transfers
from tests.support.layer_checkpoints import assert_loads, newest_step, reader_of, save_steps, tensors
from tests.support.random_examples import IS_THOROUGH

SIZES = st.lists(st.tuples(st.integers(1, 20), st.sets(st.integers(0, 2), min_size=1)), min_size=1, max_size=6)


@given(SIZES)
def test_no_single_move_helps_and_the_result_is_near_the_best(files: list[tuple[int, set[int]]]) -> None:
    sizes = {index: size for index, (size, _) in enumerate(files)}
    holders = {index: sorted(ranks) for index, (_, ranks) in enumerate(files)}
    chosen = spread(sizes, holders)
    assert all(chosen[file] in holders[file] for file in sizes)

    def most(choice: tuple[int, ...]) -> int:
        loads: Counter[int] = Counter()
        for file, holder in enumerate(choice):
            loads[holder] += sizes[file]
        return max(loads.values())

    result = tuple(chosen[file] for file in sizes)
    best = min(most(choice) for choice in itertools.product(*holders.values()))
    assert most(result) <= 2 * best
    for file in sizes:
        for other in holders[file]:
            assert most((*result[:file], other, *result[file + 1 :])) >= most(result)


def holding(rank: int, layer: str, key: str = "w", size: int = 8, nodes: str = "aabb") -> Holding:
    return Holding(rank, nodes[rank], layer, "tp0of1", key, Box((0,), (size,)), size)


SHARED = Location("", StorageTier.SHARED)
LAYERS = [f"block-{number:04d}" for number in range(6)]


def disk(node: str) -> Location:
    return Location(node, StorageTier.DISK)


def rows(start: int, stop: int) -> Box:
    return Box((start, 0), (stop - start, 4))


def chosen(box: Box, *entries: tuple[Box, Location]) -> list[tuple[Box, Location]]:
    """What rank 0 on node "here" gets, and from where."""
    bitmap = Bitmap(7)
    for held, location in entries:
        bitmap.add("block-0000", "param.w", held, location)
    fetches = choose_sources({0: [Need("block-0000", "param.w", box, 2)]}, {0: "here"}, bitmap)[0]
    assert all(
        each.read.box == (each.box if each.read.location.tier == StorageTier.MEMORY else held)
        for each in fetches
        for held, location in entries
        if location == each.read.location and held.intersection(each.box) == each.box
    )
    return [(fetch.box, fetch.read.location) for fetch in fetches]


def test_each_part_comes_from_the_nearest_place() -> None:
    entries = (
        (rows(0, 2), Location("here", StorageTier.MEMORY)),
        (rows(0, 4), disk("here")),
        (rows(2, 6), Location("there", StorageTier.MEMORY)),
        (rows(0, 8), SHARED),
    )
    assert sorted(chosen(rows(1, 8), *entries)) == [
        (box, location)
        for box, (_, location) in zip((rows(1, 2), rows(2, 4), rows(4, 6), rows(6, 8)), entries, strict=True)
    ]

    # Other nodes give evenly.
    fetched = chosen(rows(0, 12), *((rows(row, row + 1), disk(node)) for row in range(12) for node in "abc"))
    assert Counter(location.node for _, location in fetched) == {"a": 4, "b": 4, "c": 4}


def fetch(layer: str, location: Location, start: int = 0, stop: int = 10) -> Fetch:
    box = Box((start,), (stop - start,))
    return Fetch(box, 4 * box.numel, Read(layer, f"param.{layer}", Box((0,), (10,)), location))


def test_what_the_shared_folder_has_is_read_once_and_evenly() -> None:
    fetches = {rank: [fetch(layer, SHARED) for layer in LAYERS] for rank in range(3)}
    reads, transfers = reads_and_transfers(fetches, dict(enumerate("aab")))
    assert sorted(read.layer for of_rank in reads.values() for read in of_rank) == LAYERS
    assert [len(reads[rank]) for rank in range(3)] == [2, 2, 2]
    assert len(transfers) == 12
    for each in transfers:
        assert each.layer in {read.layer for read in reads[each.sender]} and each.sender != each.receiver
    # Layers in different places take turns: else the disk of one node would wait for that of the other.
    found = {0: [Read(layer, "x", Box((0,), (1,)), disk(node)) for layer, node in zip(LAYERS, "aabb", strict=False)]}
    assert layer_order(found) == ["block-0000", "block-0002", "block-0001", "block-0003"]


@given(st.data())
def test_all_get_what_they_need_and_no_more_is_read_than_is_needed(data: st.DataObject) -> None:
    """Files of two halves of tensors, on some of three nodes or in the shared folder alone."""
    node_of = dict(enumerate(data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5))))
    bitmap, needs = Bitmap(), defaultdict(list)
    for layer in LAYERS[:3]:
        for half in (rows(0, 4), rows(4, 8)):
            nodes = data.draw(st.sets(st.sampled_from(sorted(set(node_of.values())))))
            for location in [disk(node) for node in nodes] or [SHARED]:
                bitmap.add(layer, layer, half, location)
        cuts = [0, *sorted(data.draw(st.sets(st.integers(1, 7), max_size=3))), 8]
        for start, stop in itertools.pairwise(cuts):
            for rank in data.draw(st.sets(st.sampled_from(sorted(node_of)), min_size=1)):
                needs[rank].append(Need(layer, layer, rows(start, stop), 4))
    fetches = choose_sources({rank: needs[rank] for rank in node_of}, node_of, bitmap)
    reads, transfers = reads_and_transfers(fetches, node_of)
    for rank, of_rank in fetches.items():
        own = [(read.key, read.box) for read in reads[rank]]
        assert len(own) == len(set(own))
        assert all(read.location.node in (node_of[rank], "") for read in reads[rank])
        received = [(each.key, each.box) for each in transfers if each.receiver == rank]
        for each in of_rank:
            is_read = (each.read.key, each.read.box) in own
            assert is_read + received.count((each.read.key, each.box)) == 1
    for each in transfers:
        assert any(read.key == each.key and read.box.intersection(each.box) == each.box for read in reads[each.sender])
    needed, read_elements = Counter[tuple[str, Box]](), Counter[tuple[str, Box]]()
    for of_rank in fetches.values():
        for each in of_rank:
            needed[each.read.key, each.read.box] += each.box.numel
    for read in (read for of_rank in reads.values() for read in of_rank):
        read_elements[read.key, read.box] += read.box.numel
    assert all(read_elements[each] <= needed[each] for each in needed)


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
def test_without_another_copy_the_error_names_the_file_and_a_complete_checkpoint(folders, damage):
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


def load(folder: Path, key: str, *shape: int, more: int = 0, dtype: torch.dtype = torch.float32) -> None:
    """Load a tensor that may not be in a checkpoint, and so many elements more than it has."""
    if not (folder / STEP).exists():
        save_steps(folder, 20)
    box = Box((0,) * len(shape), tuple(size + more for size in shape))
    reader_of(folder).load([TensorPiece("x", key, shape, box, torch.empty(box.sizes, dtype=dtype), "y")])


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
    assert newest_whole([]) == ([], [])
