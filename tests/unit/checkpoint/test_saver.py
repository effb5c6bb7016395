"""Saving by several simulated ranks: who writes what, from which memory, what stays, and what goes wrong."""

import errno
import gc
import io
import itertools
import json
import math
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore

from colossal_hetero.checkpoint import layer_files
from colossal_hetero.checkpoint import saver as saver_module
from colossal_hetero.checkpoint.config import CheckpointError
from colossal_hetero.checkpoint.pieces import Box, RunState, TensorPiece, whole
from colossal_hetero.checkpoint.saver import LayerCheckpointSaver
from colossal_hetero.checkpoint.staging import StagingBuffer
from colossal_hetero.checkpoint.storage import FileOperations
from tests.support.fake_cuda import FakeCuda
from tests.support.harness import run_alone
from tests.support.layer_checkpoints import (
    assert_loads,
    newest_step,
    one_saver,
    participants,
    pieces_of,
    reader_of,
    save_steps,
    tensors,
)
from tests.support.torn_saves import check_killed, operations_of_a_save

NODES = "aab"
HELD = [(2, 0, ""), (2, 1, ""), (2, 0, "block")]
"""By rank: tensor-parallel degree and rank, and layers. Node b holds copies of some files of node a."""

FILES = {f"{layer}.tp{rank}of2.safetensors" for layer in ("block-0000", "block-0001") for rank in (0, 1)}
FILES |= {f"{layer}.tp{rank}of2.safetensors" for layer in ("embedding", "head") for rank in (0, 1)}


class Run:
    """Three ranks on two nodes."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root, self.logs, self.savers = root, [io.StringIO() for _ in NODES], []
        self.start("first", **options)

    def start(self, run: str, tiers: str = "local shared", files: Any = None, **options: Any) -> None:
        self.close()
        store = options.pop("store", HashStore())
        known = participants(NODES, [pieces_of(tensors(0), *held) for held in HELD], run)
        self.savers = [
            LayerCheckpointSaver(
                each,
                local=self.root / f"local-{each.node}" if "local" in tiers else None,
                shared=self.root / "shared" if "shared" in tiers else None,
                store=store,
                files=(files or {}).get(each.rank),
                log=self.logs[each.rank],
                **{"time_limit_seconds": 20.0, **options},
            )
            for each in known
        ]

    def save(self, step: int, ranks: tuple[int, ...] = (0, 1, 2)) -> list[bool]:
        everyone = [saver.is_ready() for saver in self.savers]
        ready = all(each[0] for each in everyone), all(each[1] for each in everyone)
        return [
            self.savers[rank].save(step, pieces_of(tensors(step), *HELD[rank]), self.state(step, rank), ready=ready)
            for rank in ranks
        ]

    def state(self, step: int, rank: int) -> RunState:
        common = {"step": step, "best": math.inf}
        return RunState(epoch=step // 10, common=common, rank={"rank": rank}, binary={"rng": bytes([rank])})

    def wait(self) -> str:
        """Wait for all ranks; returns what went wrong, the same on all."""

        def error_of(saver: LayerCheckpointSaver) -> str:
            try:
                saver.wait()
            except CheckpointError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(self.savers)) as pool:
            (error,) = set(pool.map(error_of, self.savers))
        return error

    def become_idle(self) -> None:
        while not all(saver.is_idle for saver in self.savers):
            time.sleep(0.01)
        self.wait()

    def close(self) -> None:
        for saver in self.savers:
            saver.close()

    def files(self, folder: str, step: int) -> set[str]:
        return {path.name for path in (self.root / folder / f"step-{step:08d}").glob("*.safetensors")}

    def steps(self, folder: str) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.root / folder).iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("tiers", ["local shared", "local", "shared"])
def test_each_node_keeps_its_files_and_each_file_is_uploaded_once(run: Run, tiers: str) -> None:
    run.start("second", tiers)
    assert run.save(10) == [True] * 3
    assert run.wait() == ""
    on_b = {name for name in FILES if name.startswith("block") and "tp0" in name}
    if "local" in tiers:
        assert run.files("local-a", 10) == FILES
        assert run.files("local-b", 10) == on_b
        assert_loads(reader_of(run.root / "local-b", step=10), 2, 0, "block")
        assert_loads(reader_of(run.root / "local-b", run.root / "local-a", step=10))
    if "shared" in tiers:
        assert run.files("shared", 10) == FILES
        parts = [json.loads(path.read_text()) for path in (run.root / "shared/step-00000010").glob("part-*.json")]
        uploaded = {part["node"]: {file["name"] for file in part["files"]} for part in parts}
        assert uploaded["b"] and uploaded["a"] | uploaded["b"] == FILES and not uploaded["a"] & uploaded["b"]
        assert_loads(reader_of(run.root / "shared", step=10))
        assert_loads(reader_of(run.root / "shared", step=10), 3, 1)
    reader = reader_of(run.root / ("local-a" if "local" in tiers else "shared"), step=10)
    manifest = reader.checkpoint.manifest
    assert (manifest.epoch, manifest.common, manifest.world_size) == (1, {"step": 10, "best": math.inf}, 3)
    assert [state.rank for state in reader.states()] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert [state.binary for state in reader.states()] == [{"rng": b"\0"}, {"rng": b"\1"}, {"rng": b"\2"}]
    assert run.logs[0].getvalue() == ""


def test_safetensors_reads_the_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also large boxes, which are written as several."""
    save_steps(tmp_path, 10)
    files = [load_file(path) for path in (tmp_path / "step-00000010").glob("*.safetensors")]
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert found.keys() == tensors(10).keys()
    assert all(torch.equal(found[key], value) for key, value in tensors(10).items())
    monkeypatch.setattr(layer_files, "MAX_BOX_BYTES", 480)
    save_steps(tmp_path, 20, run="again")
    found = load_file(tmp_path / "step-00000020/embedding.tp0of1.safetensors")
    parts = [found[f"exp_avg.embedding.weight[{rows},0:12]"] for rows in ("0:10", "10:20", "20:30")]
    assert torch.equal(torch.cat(parts), tensors(20)["exp_avg.embedding.weight"])
    for rank in range(3):
        assert_loads(reader_of(tmp_path), 3, rank)


def test_every_type_is_saved_and_loaded(tmp_path: Path) -> None:
    files, path = FileOperations(), tmp_path / "file"
    for dtype, shape in itertools.product(layer_files.TYPES, [(), (3,), (5, 7), (2, 3, 4)]):
        data = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
        content = data.reshape(-1).view(torch.uint8).numpy()
        piece = TensorPiece("layer", "buffer.x", shape, whole(shape), data, "whole")
        layer_files.write_layer_file(files, path, [(piece, content)])
        (found,) = load_file(path).values()
        assert found.dtype == dtype and found.shape == data.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), data.reshape(-1).view(torch.uint8))
    with pytest.raises(ValueError, match=r"buffer.x is of type torch.complex128"):
        other = replace(piece, data=data.to(torch.complex128))
        layer_files.write_layer_file(files, path, [(other, np.zeros(384, np.uint8))])


def test_what_changes_after_a_save_is_not_saved(tmp_path: Path) -> None:
    values = tensors(10)
    with one_saver(tmp_path) as saver:
        saver.save(10, pieces_of(values), ready=(True, True))
        for value in values.values():
            value.zero_()
        saver.wait()
    assert_loads(reader_of(tmp_path, step=10))


def test_the_newest_are_kept_also_after_a_return_to_an_earlier_step(tmp_path: Path) -> None:
    def steps() -> list[int]:
        return sorted(int(path.name[5:]) for path in tmp_path.iterdir())

    save_steps(tmp_path, 10, 20, 30, 40, 50)
    assert steps() == [30, 40, 50]
    (tmp_path / ".unfinished-step-00000060.lost.6").mkdir()
    (tmp_path / "step-00000007").mkdir()  # of another program
    save_steps(tmp_path, 35, run="again")
    assert steps() == [7, 35, 40, 50]
    assert newest_step(tmp_path) == 35
    save_steps(tmp_path, 50, keep=1, run="once more")
    assert steps() == [7, 50]
    assert_loads(reader_of(tmp_path, step=50))


class Faulty(FileOperations):
    """A disk that takes ``free`` bytes, a shared folder that hangs until it is back, files that take some time."""

    def __init__(self, free: float = math.inf, hangs: bool = False, seconds: float = 0.0) -> None:
        self.free, self.seconds = free, seconds
        self.is_back, self.hangs = threading.Event(), threading.Event()
        if not hangs:
            self.is_back.set()

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.free == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(descriptor, data[: int(min(self.free, len(data)))])
        self.free -= written
        return written

    def create(self, path: Path) -> int:
        if path.suffix == ".safetensors":
            time.sleep(self.seconds)
            if "shared" in path.parts and not self.is_back.is_set():
                self.hangs.set()
                self.is_back.wait()
        return super().create(path)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_is_reported_and_the_next_save_works(run: Run, rank: int) -> None:
    disk = Faulty(free=1000)
    run.start("second", files={rank: disk})
    assert run.save(10) == [True] * 3
    node = NODES[rank]
    expected = (
        f"no checkpoint of step 10 in the local folder {run.root}/local-a: {run.root}/local-{node}: No space left on "
        f"device (rank {rank}, node {node})"
    )
    assert run.wait() == expected
    assert run.logs[0].getvalue() == f"colossal_hetero: {expected}; training goes on\n"
    assert run.steps("local-a") == run.steps("local-b") == []
    disk.free = math.inf
    run.save(20)
    assert run.wait() == ""
    assert_loads(reader_of(run.root / "shared", step=20))
    assert run.logs[1].getvalue() == run.logs[2].getvalue() == ""


def test_a_shared_folder_that_hangs_does_not_stop_local_checkpoints(run: Run) -> None:
    folder = Faulty(hangs=True)
    run.start("second", files={1: folder}, time_limit_seconds=1.0)
    run.save(10)
    assert folder.hangs.wait(5)
    time.sleep(1.1)
    for step in (20, 30):
        assert run.save(step) == [True] * 3
        deadline = time.monotonic() + 20
        while newest_step(run.root / "local-a") != step and time.monotonic() < deadline:
            time.sleep(0.01)
        assert newest_step(run.root / "local-a") == step
    start = time.monotonic()
    assert "step 10" in run.wait()
    assert time.monotonic() - start < 5
    printed = run.logs[0].getvalue().splitlines()
    assert printed and "step 10" in printed[0] and str(run.root / "shared") in printed[0]
    assert len(printed) <= 3
    folder.is_back.set()
    run.become_idle()
    run.save(40)
    assert run.wait() == ""
    assert newest_step(run.root / "shared") == 40
    assert run.steps("shared")[-1] == 40


def test_a_shared_folder_alone_that_hangs_does_not_stop_training(run: Run) -> None:
    folder = Faulty(hangs=True)
    run.start("second", "shared", files={1: folder}, time_limit_seconds=1.0, patience_seconds=0.2)
    run.save(10)
    assert folder.hangs.wait(5)
    start = time.monotonic()
    assert [run.save(step) for step in (20, 30, 40)] == [[False] * 3] * 3
    assert time.monotonic() - start < 3
    assert run.wait() != ""
    folder.is_back.set()
    run.become_idle()
    run.save(50)
    assert run.wait() == "" and newest_step(run.root / "shared") == 50


def test_nobody_waits_for_ever_for_a_rank_that_is_lost_or_has_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lost = Faulty(hangs=True), threading.Event()
    run.start("second", "shared", files={1: folder}, is_broken=lost.is_set)
    run.save(10)
    assert folder.hangs.wait(5)
    threading.Timer(0.2, lost.set).start()
    for saver in (run.savers[0], run.savers[2]):
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 10 .* a rank was lost"):
            saver.wait(20)
    folder.is_back.set()
    monkeypatch.setattr(saver_module, "GRACE_SECONDS", 0.2)
    run.start("third", "shared", time_limit_seconds=0.5)
    run.save(20)
    with ThreadPoolExecutor(2) as pool:
        for waited in [pool.submit(run.savers[rank].wait) for rank in (0, 2)]:
            with pytest.raises(CheckpointError, match="rank 1 does not wait for its checkpoints, or has ended"):
                waited.result()
    assert_loads(reader_of(run.root / "shared", step=20))
    run.start("fourth", time_limit_seconds=1.0)
    run.save(30, ranks=(0, 1))
    assert "rank 2 on node b has not written its files in 1 s" in run.wait()
    assert run.steps("local-a") == []


@pytest.mark.parametrize(
    ("rank", "tiers", "patience"),
    [(0, "local", 60.0), (1, "local shared", 60.0), (1, "shared", 0.0), (2, "local shared", 0.0), (2, "shared", 60.0)],
)
def test_a_rank_that_saves_slowly_loses_neither_other_saves_nor_the_last(run, rank, tiers, patience):
    run.start("second", tiers, files={rank: Faulty(seconds=0.02)}, patience_seconds=patience)
    last = 100 if patience == 0.0 else 4
    results = [run.save(step) for step in range(1, last + 1)]
    assert all(len(set(each)) == 1 for each in results)
    assert patience == 0.0 or all(each[0] for each in results)
    if rank == 1:  # as at the end of a script
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(LayerCheckpointSaver._at_exit, run.savers))
    else:
        assert run.wait() == ""
    for folder in [each for each in ("local-a", "local-b", "shared") if each.partition("-")[0] in tiers.split()]:
        assert run.steps(folder)[-1] == last
    assert_loads(reader_of(run.root / ("shared" if "shared" in tiers else "local-a"), step=last))
    lines = run.logs[0].getvalue().splitlines()
    assert all("is still being written on some rank; until it is, others are skipped" in line for line in lines)


def test_messages_are_forgotten(run: Run) -> None:
    store = HashStore()
    run.start("second", store=store)
    kept = []
    for step in range(10, 90, 10):
        run.save(step)
        assert run.wait() == ""
        kept.append(store.num_keys())
    assert len(set(kept[3:])) == 1


@pytest.mark.parametrize("rank", [0, 2])
def test_a_state_that_is_not_json_is_reported_at_once(run: Run, rank: int) -> None:
    for each, saver in enumerate(run.savers):
        state = RunState(rank={"what": object() if each == rank else 1}, common={"what": object()} if rank == 0 else {})
        saver.save(10, pieces_of(tensors(10), *HELD[each]), state, ready=(True, True))
    assert "object" in run.wait()
    run.save(20)
    assert run.wait() == ""
    assert run.steps("local-a") == run.steps("local-b") == run.steps("shared") == [20]


def test_two_nodes_with_one_local_folder_are_told(tmp_path: Path) -> None:
    known = participants("ab", [pieces_of(tensors(0)), pieces_of(tensors(0))])
    store = HashStore()
    savers = [LayerCheckpointSaver(each, local=tmp_path, store=store, time_limit_seconds=5) for each in known]
    for saver in savers:
        saver.save(10, pieces_of(tensors(10)), ready=(True, True))
    with ThreadPoolExecutor(2) as pool:
        for waited in [pool.submit(saver.wait) for saver in savers]:
            with pytest.raises(CheckpointError, match=r"is the local folder of node . and of node .; each node needs"):
                waited.result()
    for saver in savers:
        saver.close()


def piece(data: Tensor) -> TensorPiece:
    return TensorPiece("l", "param.a", tuple(data.shape), Box((0,) * data.dim(), tuple(data.shape)), data, "whole")


def pieces(length: int = 5) -> list[TensorPiece]:
    return [piece(torch.arange(float(length))), piece(torch.arange(6.0).view(2, 3).t()), piece(torch.empty(0))]


def assert_copied(staging: StagingBuffer, expected: list[TensorPiece]) -> None:
    for each, copied in zip(expected, staging.copy(expected), strict=True):
        assert copied.tobytes() == each.data.contiguous().numpy().tobytes()


def test_pieces_of_a_gpu_go_to_registered_memory_that_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    staging = StagingBuffer()
    assert_copied(staging, pieces())
    assert_copied(staging, pieces(4))
    (first,) = cuda.memory
    assert first[0] == "register" and first[1] % 4096 == 0
    assert_copied(staging, pieces(5000))
    assert [what for what, _ in cuda.memory] == ["register", "unregister", "register"]
    assert cuda.memory[1][1] == first[1]
    assert cuda.main.done == ["event", "event", "synchronized", "event"]  # before memory goes, copies to it end
    copied = staging.copy(pieces())
    del staging
    gc.collect()
    assert cuda.main.done[-1] == "synchronized" and len(cuda.memory) == 3  # somebody still reads it
    del copied
    gc.collect()
    assert cuda.memory[3] == ("unregister", cuda.memory[2][1])

    # Memory that cannot be registered is used as it is.
    cuda.refuses = True
    staging = StagingBuffer()
    for _ in range(2):
        assert_copied(staging, pieces())
    del staging
    gc.collect()
    assert len(cuda.memory) == 4


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # A folder in memory, where nothing waits for a disk


def kill_at_operations(start: int, stride: int) -> tuple[int, list[str]]:
    """Kill at every ``stride``-th operation from ``start``; returns the number of operations, and what was found."""
    found = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        (Path(folder) / "count").mkdir()
        operations = operations_of_a_save(Path(folder) / "count")
        for operation in range(start, operations + 1, stride):
            root = Path(folder) / (f"{operation} again" if operation // stride % 2 else str(operation))
            root.mkdir()
            found.append(check_killed(root, operation=operation))
    return operations, found


def test_a_save_that_is_killed_leaves_a_whole_checkpoint() -> None:
    # All operations are in benchmarks/checkpoint/torn_writes.py.
    operations, found = run_alone(kill_at_operations, start=3, stride=7)
    assert operations > 80
    assert {"20 killed", "30 killed"} <= set(found)
