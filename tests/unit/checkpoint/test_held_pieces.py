"""The slices of ZeRO's masters that ranks hold, each on two of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.checkpoint.held_pieces import HeldTensor, TensorDivision, pieces_of_memory
from colossal_hetero.checkpoint.held_pieces import whole as whole_part
from colossal_hetero.checkpoint.optimizer_memory import Master
from colossal_hetero.checkpoint.pieces import Box, TensorPiece, cover, whole
from colossal_hetero.common.ranks import slices_held


def test_neighbors_hold_each_slice() -> None:
    assert [slices_held(rank, 4, 2) for rank in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert [slices_held(rank, 2, 2) for rank in range(2)] == [(0, 1), (1, 0)]
    assert slices_held(0, 1, 2) == (0,) and slices_held(2, 3, 1) == (2,)


def pieces(values: torch.Tensor, rank: int, ranks: int) -> list[TensorPiece]:
    size = -(-values.numel() // ranks)
    padded = torch.nn.functional.pad(values.flatten(), (0, ranks * size - values.numel())).view(ranks, size)
    held = slices_held(rank, ranks, 2)
    master = Master(padded[list(held)].flatten(), held, ranks, True)
    shape = tuple(values.shape)
    division = TensorDivision(whole_part(shape), "whole", False)
    tensor = HeldTensor("w", "block-0000", shape, torch.empty(shape), division, False, master)
    return pieces_of_memory(tensor, "param", master.tensor)


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 5))
def test_without_any_one_rank_the_others_hold_everything(sizes: list[int], ranks: int) -> None:
    values = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    of_ranks = [pieces(values, rank, ranks) for rank in range(ranks)]
    for lost in range(ranks) if ranks > 1 else (None,):
        there = [each for rank, of_rank in enumerate(of_ranks) if rank != lost for each in of_rank]
        box = whole(tuple(sizes))
        assert not cover(box, [each.box for each in there])[1]
        for each in there:
            assert torch.equal(each.data, values[box.slices_of(each.box)])
    boxes: dict[str, frozenset[Box]] = {}
    for of_rank in of_ranks:
        for shard in {each.shard for each in of_rank}:
            own = frozenset(each.box for each in of_rank if each.shard == shard)
            assert boxes.setdefault(shard, own) == own  # files have one writer


@pytest.mark.parametrize("lost", range(4))
def test_without_two_neighbors_a_slice_is_missing(lost: int) -> None:
    values = torch.arange(16.0)
    there = [each for rank in range(4) if rank not in (lost, (lost + 1) % 4) for each in pieces(values, rank, 4)]
    assert cover(whole((16,)), [each.box for each in there])[1]
