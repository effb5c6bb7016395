"""Layer checkpoints between processes on simulated nodes, each with a local folder of its own."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from colossal_hetero.checkpoint.participants import gather_participants
from colossal_hetero.checkpoint.pieces import RunState
from colossal_hetero.checkpoint.saver import LayerCheckpointSaver
from tests.support.harness import run_ranks
from tests.support.layer_checkpoints import assert_loads, pieces_of, reader_of, tensors

HELD = [(2, 0, ""), (2, 1, ""), (1, 0, "block"), (1, 0, "")]
NODES = ["a", "a", "b", "c"]


def save_and_load(root: str) -> None:
    rank, folder = dist.get_rank(), Path(root)
    node, degree, shard, layers = NODES[rank], *HELD[rank]
    pieces = pieces_of(tensors(10), degree, shard, layers)
    known = gather_participants(pieces, node)
    store = PrefixStore("checkpoints", dist.distributed_c10d._get_default_store())
    saver = LayerCheckpointSaver(known, local=folder / node, shared=folder / "shared", store=store)
    for step in (10, 20):
        state = RunState(binary={"rng": torch.get_rng_state().numpy().tobytes()})
        assert saver.save(step, pieces_of(tensors(step), degree, shard, layers), state, ready=(True, True))
        saver.wait()
    saver.close()
    dist.barrier()
    reader = reader_of(folder / node, folder / "shared")
    assert reader.checkpoint.step == 20
    assert reader.states()[rank].binary["rng"] == torch.get_rng_state().numpy().tobytes()
    assert_loads(reader, 4, rank)
    assert not reader.problems


def test_what_one_division_saves_another_loads(tmp_path: Path) -> None:
    run_ranks(4, save_and_load, str(tmp_path))
