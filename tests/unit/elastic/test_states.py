"""Memory files of states, whose state counts after a world has broken, and who takes which place and which layers."""

import itertools
import os
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.checkpoint.pieces import Box, RunState, TensorPiece
from colossal_hetero.elastic import state_keeper
from colossal_hetero.elastic.environment import launcher_name
from colossal_hetero.elastic.held_layers import (
    CatchUp,
    HeldBox,
    HeldLayers,
    Standing,
    agree,
    inheritance,
    layers_by_rank,
    missing_bytes,
    surviving_topology,
    with_fewest_moves,
)
from colossal_hetero.elastic.memory_file import (
    FileName,
    FoundState,
    KeptBox,
    KeptState,
    MemoryFolder,
    StateName,
    newest_whole_state,
    read_memory_file,
    write_memory_file,
)
from colossal_hetero.elastic.state_keeper import StateKeeper
from tests.support.fake_cuda import FakeCuda
from tests.support.machines import Nodes, machines
from tests.support.planning import make_plan, unequal_plan


def piece(key: str, data: torch.Tensor) -> TensorPiece:
    offsets = (3,) * data.dim()
    return TensorPiece("block-0001", key, tuple(9 + size for size in data.shape), Box(offsets, data.shape), data, "tp0")


def kept(version: int, world: str = "w1", fill: float = 0.0) -> KeptState:
    pieces = [
        piece("param.a", torch.arange(15.0, dtype=torch.float64).reshape(3, 5).t() + fill),  # not contiguous
        piece("param.b", torch.randn(7, generator=torch.Generator().manual_seed(version)).bfloat16()),
        piece("step.a", torch.tensor(5.0)),
        piece("param.c", torch.empty(0, 4)),
    ]
    more = dict(param_groups=[{"lr": 0.1}], common={"loader": {"a": 1}}, binary={"r": b"\0\xff"})
    state, layers = RunState(epoch=2, plan="p", **more), HeldLayers(((0, 2), (4, 5)), 1, 2)  # type: ignore[arg-type]
    return KeptState(StateName(version, world), ("a", "b", "c"), layers, pieces, {"step": "number"}, state)


def test_what_is_written_is_read_and_what_is_cut_off_or_not_ours_is_not(tmp_path: Path) -> None:
    written, file, torn = kept(4), tmp_path / "file", tmp_path / "torn"
    write_memory_file(file, written)
    read = read_memory_file(file)
    assert read is not None
    assert (read.found.name, read.found.tensors) == (written.name, written.tensors)
    assert (read.layers, read.kinds, read.state) == (written.layers, written.kinds, written.state)
    for before, after in zip(written.pieces, read.pieces(), strict=True):
        assert replace(before, data=None) == replace(after, data=None)
        assert before.data.dtype == after.data.dtype
        assert torch.equal(before.data, after.data)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    content = file.read_bytes()
    cut = [content[:size] for size in (0, 4, 12, 100, len(content) // 2, len(content) - 1)]
    for other in (*cut, b"CHSTATE9" + content[8:]):
        torn.write_bytes(other)
        assert read_memory_file(torn) is None
    assert read_memory_file(tmp_path / "missing") is None


def test_files_of_other_jobs_and_nodes_are_not_seen(tmp_path: Path) -> None:
    ended = "launcher-999999999-1"
    for job, node in (("job/1", "a"), ("job/1", "b"), ("job-2", "a"), (ended, "a"), (launcher_name(os.getpid()), "a")):
        folder = MemoryFolder(tmp_path, job, node)
        folder.path.mkdir(parents=True)
        write_memory_file(folder.file(FileName(StateName(3, "w"), 0)), kept(3))
    folder = MemoryFolder(tmp_path, "job/1", "a")
    folder.prepare()
    assert folder.files() == [FileName(StateName(3, "w"), 0)]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["job%2F1", "job-2", launcher_name(os.getpid())])
    folder.remove_all()
    assert folder.files() == [] and MemoryFolder(tmp_path, "job/1", "b").files() != []
    MemoryFolder(tmp_path, "job/1", "b").remove_all()
    assert not (tmp_path / "job%2F1").exists()


@pytest.fixture
def folder(tmp_path: Path) -> MemoryFolder:
    made = MemoryFolder(tmp_path, "job", "node")
    made.prepare()
    return made


def keep(keeper: StateKeeper, version: int) -> None:
    keeper.note(kept(version))
    keeper.settle()
    keeper.forget()


def versions(folder: MemoryFolder) -> list[tuple[str, int]]:
    return [(each.state.world, each.state.version) for each in folder.files()]


@pytest.mark.parametrize(("every", "expected"), [(1, [4, 5]), (2, [2, 4]), (3, [0, 3])])
def test_the_latest_two_states_stay(folder: MemoryFolder, every: int, expected: list[int]) -> None:
    write_memory_file(folder.file(FileName(StateName(9, "w0"), 3)), kept(9, "w0"))
    keeper = StateKeeper(folder, 0, every, tidies=True)
    for version in range(6):
        keeper.note(kept(version))
        keeper.settle()
        if version == 0:  # other ranks may not have written theirs
            assert versions(folder) == [("w1", 0), ("w0", 9)]
        keeper.forget()
    assert versions(folder) == [("w1", version) for version in expected]
    keeper.note(kept(6))
    assert keeper.write()  # the process is about to end
    assert versions(folder)[-1] == ("w1", 6) and len(versions(folder)) <= 2
    keeper.close()
    assert not keeper.write()

    # A worker that does not tidy leaves the files of others.
    folder.remove_all()
    folder.prepare()
    others = [FileName(StateName(9, "w0"), 1), FileName(StateName(0, "w1"), 0)]
    for name in others:
        write_memory_file(folder.file(name), kept(*name.state))
    keeper = StateKeeper(folder, 1, 1, tidies=False)
    for version in range(4):
        keep(keeper, version)
    assert set(others) <= set(folder.files()) and len(folder.files()) == 4
    keeper.close()


def test_a_state_is_not_changed_while_it_is_written(folder: MemoryFolder) -> None:
    """Whoever makes a step calls ``forget`` first, which waits for a thread that writes."""
    keeper = StateKeeper(folder, 0, 100, tidies=True)
    keep(keeper, 0)
    state = kept(1, fill=1.0)
    started = threading.Event()

    def slow(*arguments: object) -> None:
        started.set()
        time.sleep(0.3)
        write_memory_file(*arguments)  # type: ignore[arg-type]

    with patch.object(state_keeper, "write_memory_file", slow):
        waiting = threading.Thread(target=keeper.write_within, args=(10.0,))
        waiting.start()  # while a step is made
        time.sleep(0.1)
        keeper.note(state)
        started.wait()
        keeper.forget()
        state.pieces[0].data.zero_()
        waiting.join()
    read = read_memory_file(folder.file(FileName(state.name, 0)))
    assert read is not None
    assert torch.equal(read.pieces()[0].data, kept(1, fill=1.0).pieces[0].data)
    keeper.close()


def test_a_process_that_ends_during_a_commit_writes_what_the_others_write(folder: MemoryFolder) -> None:
    """The others may have ended the commit already, and write the state after it."""
    keeper = StateKeeper(folder, 0, 100, tidies=True)
    keeper.note(kept(0))
    keeper.settle()
    with keeper.commit():
        ending = threading.Thread(target=keeper.write_within, args=(10.0,))
        ending.start()
        while not keeper._is_ending:
            time.sleep(0.01)
    keeper.note(kept(1))
    ending.join()
    assert versions(folder)[-1] == ("w1", 1)

    def commits() -> None:
        with keeper.commit():
            raise AssertionError("a commit begins after this rank has written its state")

    late = threading.Thread(target=commits, daemon=True)
    late.start()
    late.join(0.2)
    assert late.is_alive()


def test_a_full_memory_is_told_once(folder: MemoryFolder, capfd: pytest.CaptureFixture[str]) -> None:
    keeper = StateKeeper(folder, 0, 1, tidies=True)
    with patch.object(state_keeper, "write_memory_file", side_effect=OSError(28, "No space left on device")):
        for version in range(3):
            keep(keeper, version)
    assert capfd.readouterr().err.count("No space left on device") == 1
    keeper.note(kept(3))
    keeper.settle()
    assert versions(folder) == [("w1", 3)]
    keeper.close()


def test_copies_from_a_gpu_use_one_stream_of_high_priority_and_two_buffers(folder, monkeypatch):
    """No copy waits behind a collective that does not end: streams of NCCL come from the pool of normal priority."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(state_keeper, "CHUNK", 32)
    keeper = StateKeeper(folder, 0, 1, tidies=True)
    for version in range(3):
        keeper.note(kept(version))
        keeper.settle()
        (stream,) = cuda.streams  # however many tensors and states there are
        assert stream.priority < 0
        assert stream.done[0] == ("wait", cuda.main) and stream.done.count(("wait", cuda.main)) == 1
        # A chunk is copied while the one before is written.
        assert stream.done[1:5] == ["event", "event", "synchronized", "event"]
        stream.done.clear()
        read = read_memory_file(folder.file(FileName(StateName(version, "w1"), 0)))
        assert read is not None
        for before, after in zip(kept(version).pieces, read.pieces(), strict=True):
            assert torch.equal(before.data, after.data)
        keeper.forget()
    assert [what for what, _ in cuda.memory] == ["register"]
    keeper.note(kept(3))
    keeper.settle()
    stream.done.clear()
    keeper.note_again(kept(3, fill=2.0).pieces)  # what was received since
    assert keeper.write() and stream.done[0] == ("wait", cuda.main)
    keeper.close()


A, B = "param.a", "param.b"
ROWS = [Box((0, 0), (2, 3)), Box((2, 0), (3, 3))]  # of a tensor of 5 by 3


def part(version: int, world: str, *boxes: tuple[str, Box]) -> FoundState:
    return FoundState(StateName(version, world), ("a", "b"), tuple(KeptBox(key, (5, 3), box) for key, box in boxes))


def test_a_state_counts_if_every_element_is_in_some_file() -> None:
    """By brute force: each subset of the files of five ranks, of which some hold the same."""
    whole = Box((0, 0), (5, 3))
    new = [
        part(7, "w1", (A, ROWS[0]), (B, whole)),
        part(7, "w1", (A, ROWS[1])),
        part(7, "w1", (A, Box((1, 0), (4, 3)))),  # overlaps with both
        part(7, "w1", (A, ROWS[0])),
        part(7, "w1", (B, ROWS[0]), (B, ROWS[1])),
    ]
    old = part(6, "w1", (A, whole), (B, whole))
    for count in range(6):
        for kept in combinations(new, count):
            elements = {(each.key, row) for file in kept for each in file.boxes for row in rows_of(each.box)}
            name = StateName(7 if len(elements) == 10 else 6, "w1")
            assert newest_whole_state([old, *kept]) == name
            assert (newest_whole_state(kept) is None) == (len(elements) < 10)


def test_worlds_are_not_mixed_and_the_later_one_counts() -> None:
    whole = Box((0, 0), (5, 3))
    halves = [part(7, "w1", (A, whole)), part(7, "w2", (B, whole))]
    assert newest_whole_state(halves) is None
    wholes = [part(7, "w1", (A, whole), (B, whole)), part(7, "w2", (A, whole), (B, whole))]
    assert newest_whole_state([*halves, *wholes]) == StateName(7, "w2")
    assert newest_whole_state([part(8, "w1", (A, whole), (B, whole)), *wholes]) == StateName(8, "w1")
    assert newest_whole_state([]) is None
    # A tensor without dimensions and a buffer count too.
    step, name = KeptBox("step.a", (), Box((), ())), StateName(1, "w")
    found = FoundState(name, ("a", "b"), (KeptBox(A, (5, 3), whole), KeptBox("buffer.b", (5, 3), whole), step))
    assert newest_whole_state([found]) == name


BLOCK_BYTES = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def moved(plan, held) -> float:
    return sum(missing_bytes(held[rank], needed, BLOCK_BYTES) for rank, needed in layers_by_rank(plan).items())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 2, 1, 1)])
def test_the_fewest_bytes_move(seed: int, sizes: tuple[int, ...]) -> None:
    chance = random.Random(seed)
    topology = machines(Nodes("InfiniBand", sizes))
    rows = (([[0], [1], [2]], [1, 2, 3]), ([[3], [4]], [2, 4]), ([[5]], [6]))
    plan = unequal_plan(*(make_plan([ranks], layers) for ranks, layers in rows))
    held = [
        None if chance.random() < 0.2 else HeldLayers((tuple(sorted(chance.sample(range(7), 2))),))  # type: ignore[arg-type]
        for _ in range(6)
    ]
    found = with_fewest_moves(plan, topology, held, BLOCK_BYTES)
    assert sorted(layers_by_rank(found)) == list(range(6))
    # Devices of a node may change places, and so may nodes with one device.
    classes = [device.node if len(topology.nodes[device.node].devices) > 1 else -1 for device in topology.devices]
    needed = layers_by_rank(plan)
    best = min(
        sum(missing_bytes(held[rank], needed[place], BLOCK_BYTES) for rank, place in enumerate(places))
        for places in itertools.permutations(range(6))
        if all(classes[rank] == classes[place] for rank, place in enumerate(places))
    )
    assert moved(found, held) == best
    for stage in (stage for replica in found.replicas for stage in replica.stages):
        assert stage.node == topology.nodes[topology.devices[stage.ranks[0]].node].name


NEW = Standing(None, False, None)


def test_ranks_agree_on_a_version() -> None:
    inside, four, five = Standing(4, True, "four"), Standing(4, False, "four"), Standing(5, False, "five")
    for standings, version, commit, catch_ups in (
        ([inside, four, NEW], 4, "four", "KEEP KEEP FORGET"),  # the running step is given up if nobody has made it
        ([inside, five], 5, "five", "STEP KEEP"),  # a step that somebody has made is made by all
        ([Standing(3, True, "3"), four, five], 5, "five", "FORGET FORGET KEEP"),  # who was left behind forgets
    ):
        agreed = agree(standings)
        assert agreed is not None and (agreed.version, agreed.commit) == (version, commit)
        assert agreed.catch_ups == tuple(CatchUp[each] for each in catch_ups.split())
    assert agree([NEW, NEW]) is None


CLUSTER = machines(Nodes("InfiniBand", (2, 1)), Nodes("RoCE", (3,)))


def test_devices_are_those_of_the_members() -> None:
    found = surviving_topology(CLUSTER, ["node-0", "node-2", "node-2"])
    assert [node.name for node in found.nodes] == ["node-0", "node-2"]
    assert [node.devices for node in found.nodes] == [(0,), (1, 2)]
    assert [device.node for device in found.devices] == [0, 1, 1]
    assert found.channel(0, 1).kind == "Ethernet" and found.channel(1, 2).kind == "NVLink"


def rows(start: int, stop: int, key: str = "param.w") -> HeldBox:
    return HeldBox("block-0000", key, (8, 4), "float32", Box((start, 0), (stop - start, 4)))


def rows_of(box: Box) -> range:
    return range(box.offsets[0], box.offsets[0] + box.sizes[0])


def test_two_ranks_hold_afterwards_what_the_leaving_held() -> None:
    holdings = [[rows(0, 8)], [rows(0, 2)], [rows(4, 5)], [rows(0, 8), rows(0, 8, "exp_avg.w")], []]
    taken = inheritance(holdings, [True, False, False, True, False])
    assert taken[0] == taken[3] == []
    after = [[*own, *more] for own, more in zip(holdings[1:3] + holdings[4:], taken[1:3] + taken[4:], strict=True)]
    copies = Counter((each.key, row) for of_rank in after for each in of_rank for row in rows_of(each.box))
    assert copies == {(key, row): 2 for key in ("param.w", "exp_avg.w") for row in range(8)}
    assert all(taken[rank] for rank in (1, 2, 4))

    # The last rank takes everything once, and what two others hold is not taken.
    assert inheritance([[rows(0, 8)], [rows(0, 8)], []], [True, True, False]) == [[], [], [rows(0, 8)]]
    assert inheritance([[rows(0, 8)], [rows(0, 8)], [rows(0, 8)], []], [True, False, False, False]) == [[], [], [], []]
