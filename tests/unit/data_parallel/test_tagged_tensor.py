"""Tensors of a batch that know their micro-batch, after what scripts do with them before training."""

from __future__ import annotations

import copy
import io
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from colossal_hetero.data_parallel.progress import MicroBatch
from colossal_hetero.data_parallel.tagged_tensor import TaggedTensor, micro_batches_of, tagged, untagged

ONE, OTHER = MicroBatch(4, 8, 0, 0, False), MicroBatch(4, 8, 0, 1, True)


@dataclass
class Record:
    inputs: Tensor
    name: str = "a"


@dataclass(frozen=True)
class FrozenRecord:
    inputs: Tensor


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        [torch.ones(2), 3, "text"],
        (torch.ones(2), [torch.ones(2)]),
        {"inputs": {"ids": torch.ones(2)}, "n": None},
        Pair(torch.ones(2), torch.ones(2)),
        Record(torch.ones(2)),
        UserDict(ids=torch.ones(2)),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_batches_of_all_types_know_their_micro_batch(batch: object) -> None:
    kind = type(batch)
    marked = tagged(batch, ONE)
    assert isinstance(marked, kind) and micro_batches_of(marked) == (ONE,)
    plain = untagged(marked)
    assert isinstance(plain, kind) and micro_batches_of(plain) == ()


def test_objects_that_cannot_be_changed_are_left_as_they_are() -> None:
    for batch in (FrozenRecord(torch.ones(2)), 7, "text", None):
        assert tagged(batch, ONE) is batch and micro_batches_of(batch) == ()


def test_what_is_computed_from_a_batch_knows_it_too() -> None:
    images, labels = tagged([torch.rand(4, 3), torch.tensor([0, 1, 2, 0])], ONE)
    weight = torch.randn(3, 3, requires_grad=True)
    mixed = images.to(torch.float64).float().sub_(0.5).div_(2).flip(0) * 0.3 + images * 0.7
    loss = cross_entropy(untagged(mixed) @ weight, labels)
    for each in (mixed, loss, loss.detach(), images.chunk(2)[1], images.max(1).values, copy.deepcopy(images)):
        assert isinstance(each, TaggedTensor) and micro_batches_of(each) == (ONE,)
    untagged(loss).backward()
    assert type(weight.grad) is Tensor
    reference = torch.randn(3, 3)
    torch.testing.assert_close(untagged(images @ reference), untagged(images) @ reference)


def test_joined_batches_know_all_of_them() -> None:
    one, other = tagged(torch.ones(4), ONE), tagged(torch.ones(4), OTHER)
    found = micro_batches_of(torch.cat([one, other]))
    assert len(found) == 2 and found[0] is ONE and found[1] is OTHER
    assert len(micro_batches_of([one, {"x": other}, one])) == 2


def test_tagged_tensors_are_used_and_saved_like_plain_ones() -> None:
    images = tagged(torch.rand(4, 3), ONE)
    buffer = torch.zeros(4, 3)
    buffer.copy_(images)
    assert type(buffer) is Tensor and images.numpy().shape == (4, 3) and isinstance(images.sum().item(), float)
    file = io.BytesIO()
    torch.save({"images": images, "loss": images.mean()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["images"]) is Tensor and torch.equal(loaded["images"], untagged(images))
    assert torch.equal(torch.jit.script(torch.nn.ReLU())(images), untagged(images))


def test_a_compiled_loss_can_be_computed_from_a_batch() -> None:
    labels = tagged(torch.tensor([0, 1]), ONE)
    compiled = torch.compile(lambda logits, targets: cross_entropy(logits, targets), backend="eager")
    logits = torch.randn(2, 3)
    torch.testing.assert_close(untagged(compiled(logits, labels)), cross_entropy(logits, untagged(labels)))
