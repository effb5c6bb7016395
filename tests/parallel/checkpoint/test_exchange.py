"""Boxes that ranks of other nodes have are sent to those that need them; and the store for messages of saves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from colossal_hetero.checkpoint import layer_checkpoint
from colossal_hetero.checkpoint.config import CheckpointError
from colossal_hetero.checkpoint.exchange import BoxMemory, Outcome, fetch_boxes
from colossal_hetero.checkpoint.pieces import Bitmap, Box, Location, StorageTier, TensorPiece
from colossal_hetero.checkpoint.transfers import Need, choose_sources
from tests.support.harness import run_ranks

NODES = {0: "a", 1: "a", 2: "b"}
LAYERS = tuple(f"block-{number:04d}" for number in range(6))
WHOLE = Box((0, 0), (4, 6))
VALUES = {layer: torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * n for n, layer in enumerate(LAYERS)}
NEEDED = {0: Box((0, 0), (4, 3)), 1: Box((3, 1), (1, 2)), 2: Box((0, 0), (3, 6))}


def exchanged(unreadable: str | None) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Node a has the rows and node b the columns of a grid; every rank needs other parts of it."""
    bitmap, rank = Bitmap(), dist.get_rank()
    for layer in LAYERS:
        for row in range(3):
            bitmap.add(layer, f"param.{layer}", Box((row, 0), (1, 6)), Location("a", StorageTier.DISK))
        bitmap.add(layer, f"param.{layer}", Box((0, 0), (4, 3)), Location("b", StorageTier.DISK))
    needs = {each: [Need(layer, f"param.{layer}", box, 4) for layer in LAYERS] for each, box in NEEDED.items()}
    data = {layer: torch.full(NEEDED[rank].sizes, -1.0) for layer in LAYERS}
    pieces = [TensorPiece(layer, f"param.{layer}", (4, 6), NEEDED[rank], data[layer], "whole") for layer in LAYERS]
    memory = BoxMemory(pieces, {piece.key: piece.shape for piece in pieces}, {piece.key: "float32" for piece in pieces})

    def fill(targets: Sequence[TensorPiece]) -> None:
        for target in targets:
            if target.layer == unreadable and rank == 2:
                raise CheckpointError("damaged")
            target.data.copy_(VALUES[target.layer][WHOLE.slices_of(target.box)])

    return fetch_boxes(choose_sources(needs, NODES, bitmap), NODES, memory, fill), data


def check_exchange(unreadable: str | None) -> tuple[int, int]:
    outcome, data = exchanged(unreadable)
    for layer in LAYERS:
        if layer != unreadable:
            assert torch.equal(data[layer], VALUES[layer][WHOLE.slices_of(NEEDED[dist.get_rank()])])
    assert all(each.layer == unreadable for each in outcome.left)
    found = [(unreadable, Location("b", StorageTier.DISK), "damaged")] if dist.get_rank() == 2 and unreadable else []
    assert outcome.problems == found
    return outcome.received_bytes, len(outcome.left)


def check_exchanges() -> list[tuple[int, int]]:
    return [check_exchange(None), check_exchange(LAYERS[1])]


def test_ranks_get_what_only_other_nodes_have() -> None:
    # Ranks 0 and 1 lack a part of the last row, and rank 2 the right half of three rows.
    for lost, found in enumerate(zip(*run_ranks(3, check_exchanges), strict=True)):
        layers = len(LAYERS) - lost
        assert found == ((layers * 4 * 3, lost), (layers * 4 * 2, lost), (len(LAYERS) * 4 * 9, lost))


def message_through_store(master: str, own: str) -> bytes:
    """What rank 1 has written, as both ranks read it."""
    os.environ["MASTER_ADDR"] = master
    is_loopback = {"_is_loopback": lambda address: address == "127.0.0.1"}
    with patch.multiple(layer_checkpoint, own_address=lambda: own, STORE_SECONDS=5.0, **is_loopback):
        store = layer_checkpoint._new_store()
    assert store is not None
    if dist.get_rank() == 1:
        store.set("key", "value")
    value = store.get("key")
    dist.barrier()
    return value


@pytest.mark.parametrize(("master", "own"), [("192.0.2.1", "127.0.0.2"), ("127.0.0.1", "127.0.0.1")])
def test_the_store_of_messages_is_on_the_machine_of_rank_0(master: str, own: str) -> None:
    """192.0.2.1 is on no machine; 127.0.0.2 leads here, and stands for an address of rank 0's machine."""
    assert run_ranks(2, message_through_store, master, own) == [b"value"] * 2
