"""Names, layers and groups of a model's tensors; boxes of tensors; slices of masters, each on two ranks."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from colossal_hetero.checkpoint import held_pieces
from colossal_hetero.checkpoint.model_outline import ModelOutline, outline_of
from colossal_hetero.checkpoint.optimizer_memory import Master
from colossal_hetero.checkpoint.pieces import Box, TensorPiece, cover
from colossal_hetero.checkpoint.pieces import whole as whole_box
from colossal_hetero.checkpoint.run_states import as_bytes, from_bytes, matching_groups
from colossal_hetero.common.ranks import slices_held
from tests.support.language_models import gpt2
from tests.support.model_families import BUILDERS
from tests.support.training import tiny_vit


def test_tensors_belong_to_layers_and_tied_ones_occur_once() -> None:
    outline = outline_of(gpt2())
    assert outline.names["lm_head.weight"] == "transformer.wte.weight" and "lm_head.weight" not in outline.shapes
    assert list(dict.fromkeys(outline.layers.values())) == ["embedding", "block-0000", "block-0001", "head"]
    assert outline.layers["transformer.ln_f.bias"] == "head"
    assert outline_of(tiny_vit()).layers["cls_token"] == "embedding"

    # A model without a row of blocks has a layer for each module, and one with two rows has their blocks as layers.
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("passing", torch.zeros(2), persistent=False)
    outline = outline_of(model)
    assert set(outline.layers.values()) == {"0", "1"}
    assert outline.shapes["1.num_batches_tracked"] == () and "passing" not in outline.shapes
    layers = outline_of(BUILDERS["t5"]()[0]).layers
    assert layers["encoder.block.1.layer.0.SelfAttention.q.weight"] == "encoder-block-1"
    assert layers["decoder.final_layer_norm.weight"] == "decoder-final_layer_norm"


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def grouped() -> ModelOutline:
    """Of two layers, with each parameter in a group of its own."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    return outline_of(model, torch.optim.SGD([dict(params=[each]) for each in model.parameters()], lr=0.1))


def test_groups_are_matched_by_the_names_of_their_parameters() -> None:
    assert matching_groups(grouped(), [[name] for name in reversed(NAMES)]) == [3, 2, 1, 0]


def test_states_are_saved_without_code() -> None:
    state = {"a": (1, None), 3: torch.arange(2), "lr": [0.5]}
    found = from_bytes(as_bytes(state, "the state"))
    assert torch.equal(found.pop(3), torch.arange(2)) and found == {"a": (1, None), "lr": [0.5]}


def indices(box: Box) -> set[tuple[int, ...]]:
    spans = [range(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True)]
    return set(itertools.product(*spans))


def boxes(dimensions: int) -> st.SearchStrategy[Box]:
    numbers = st.tuples(*[st.integers(0, 4)] * dimensions)
    sizes = st.tuples(*[st.integers(1, 4)] * dimensions)
    return st.builds(Box, numbers, sizes)


@given(st.integers(1, 3).flatmap(lambda rank: st.tuples(boxes(rank), st.lists(boxes(rank), max_size=4))))
def test_a_cover_has_each_element_once_and_the_rest_is_left(case: tuple[Box, list[Box]]) -> None:
    needed, held = case
    parts, left = cover(needed, held)
    found = [index for _, part in parts for index in indices(part)]
    found += [index for part in left for index in indices(part)]
    assert sorted(found) == sorted(indices(needed))
    for number, part in parts:
        assert indices(part) <= indices(held[number])
    for part in left:
        assert not any(indices(part) & indices(box) for box in held)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def put(parts: Any, local: Tensor, target: Tensor) -> None:
    """Copy what a rank has into the whole tensor; every element at most once."""
    everything = Box((0,) * target.dim(), tuple(target.shape))
    of_local = Box((0,) * local.dim(), tuple(local.shape))
    for part in parts:
        place = target[everything.slices_of(part.whole)]
        assert (place == -1).all()
        place.copy_(local[of_local.slices_of(part.local)])


@given(st.data())
def test_the_slices_of_the_shares_of_all_ranks_are_the_whole_tensor(data: st.DataObject) -> None:
    """Colossal-AI divides sections into equal shares, the last with padding behind it; ZeRO slices shares equally."""
    ranks, shards = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    sections = [ranks * each for each in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]
    size = sum(sections)
    padding = data.draw(st.integers(0, size - 1)) if len(sections) == 1 else 0
    shape = list(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = size - padding
    values = numbered(tuple(shape))
    pad = values.new_zeros([padding if axis == dim % len(shape) else length for axis, length in enumerate(shape)])
    found = torch.full_like(values, -1)
    for rank in range(ranks):
        chunks = torch.cat([values, pad], dim).split(sections, dim)
        local = torch.cat([chunk.chunk(ranks, dim)[rank] for chunk in chunks], dim)
        parts = held_pieces.divided(shape, dim, sections, rank, ranks, size if padding else 0)
        slice_size = -(-local.numel() // shards)
        for start in range(0, shards * slice_size, slice_size):
            put(held_pieces.sliced(parts, local.shape, start, start + slice_size), local, found)
    assert torch.equal(found, values)


def pieces(values: torch.Tensor, rank: int, ranks: int) -> list[TensorPiece]:
    size = -(-values.numel() // ranks)
    padded = torch.nn.functional.pad(values.flatten(), (0, ranks * size - values.numel())).view(ranks, size)
    held = slices_held(rank, ranks, 2)
    master = Master(padded[list(held)].flatten(), held, ranks, True)
    shape = tuple(values.shape)
    division = held_pieces.TensorDivision(held_pieces.whole(shape), "whole", False)
    tensor = held_pieces.HeldTensor("w", "block-0000", shape, torch.empty(shape), division, False, master)
    return held_pieces.pieces_of_memory(tensor, "param", master.tensor)


@given(st.lists(st.integers(1, 5), max_size=3), st.integers(1, 5))
def test_without_any_one_rank_the_others_hold_everything(sizes: list[int], ranks: int) -> None:
    values = torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    of_ranks = [pieces(values, rank, ranks) for rank in range(ranks)]
    for lost in range(ranks) if ranks > 1 else (None,):
        there = [each for rank, of_rank in enumerate(of_ranks) if rank != lost for each in of_rank]
        box = whole_box(tuple(sizes))
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
    assert slices_held(3, 4, 2) == (3, 0)  # its own first
    values = torch.arange(16.0)
    there = [each for rank in range(4) if rank not in (lost, (lost + 1) % 4) for each in pieces(values, rank, 4)]
    assert cover(whole_box((16,)), [each.box for each in there])[1]
