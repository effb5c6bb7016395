"""Boxes that ranks of other nodes have are sent to those that need them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from colossal_hetero.checkpoint.exchange import exchange
from colossal_hetero.checkpoint.format.pieces import Box, TensorPiece
from colossal_hetero.checkpoint.placement.bitmap import Bitmap, Location, StorageTier
from colossal_hetero.checkpoint.placement.sources import Need, choose_sources
from colossal_hetero.checkpoint.placement.transfers import transfers_between
from tests.support.harness import run_ranks

NODES = {0: "a", 1: "a", 2: "b"}
LAYERS = ("block-0000", "head")
WHOLE = Box((0, 0), (4, 6))
VALUES = {layer: torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * n for n, layer in enumerate(LAYERS)}


def check_exchange() -> int:
    """Node a has the rows and node b the columns of a grid; every rank needs other parts of it."""
    bitmap, rank = Bitmap(), dist.get_rank()
    for layer in LAYERS:
        for row in range(3):
            bitmap.add(1, layer, f"param.{layer}", Box((row, 0), (1, 6)), Location("a", StorageTier.DISK))
        bitmap.add(1, layer, f"param.{layer}", Box((0, 0), (4, 3)), Location("b", StorageTier.DISK))
    needed = {0: Box((0, 0), (4, 3)), 1: Box((3, 1), (1, 2)), 2: Box((0, 0), (3, 6))}
    needs = {each: [Need(layer, f"param.{layer}", box, 4) for layer in LAYERS] for each, box in needed.items()}
    fetches = choose_sources(1, needs, NODES, bitmap)
    data = {layer: torch.full(needed[rank].sizes, -1.0) for layer in LAYERS}
    pieces = {
        f"param.{layer}": [TensorPiece(layer, f"param.{layer}", (4, 6), needed[rank], data[layer], "whole")]
        for layer in LAYERS
    }
    for fetch in fetches[rank]:
        if fetch.location.node == NODES[rank]:
            target = data[fetch.layer][needed[rank].slices_of(fetch.box)]
            target.copy_(VALUES[fetch.layer][WHOLE.slices_of(fetch.box)])

    transfers = transfers_between(fetches, NODES)
    outgoing = {each: VALUES[each.layer][WHOLE.slices_of(each.box)] for each in transfers if each.sender == rank}
    received = exchange(transfers, outgoing, pieces)
    for layer in LAYERS:
        assert torch.equal(data[layer], VALUES[layer][WHOLE.slices_of(needed[rank])])
    return received


def test_ranks_get_what_only_other_nodes_have() -> None:
    # Ranks 0 and 1 lack a part of the last row, and rank 2 the right half of three rows.
    assert run_ranks(3, check_exchange) == [2 * 4 * 3, 2 * 4 * 2, 2 * 4 * 9]
