"""Which micro-batch each pass of a loop belongs to, by its calls or by tensors."""

import copy
import io
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from colossal_hetero.data_parallel.progress import LoopProgress, MicroBatch
from colossal_hetero.data_parallel.tagged_tensor import (
    TaggedTensor,
    micro_batches_of,
    share_of_samples,
    tagged,
    untagged,
)


def play(calls: str, parts: int = 2, global_batches: int = 2) -> LoopProgress:
    """Make the calls of a training loop, such as ``draw 0, forward 0, backward, step``. Numbers name micro-batches, of
    which each global batch has so many; without numbers, tensors do not show where they come from. ``= 0`` says which
    micro-batch a pass must belong to (``-``: none), and whether the optimizer steps."""
    known = [MicroBatch(1, parts, k, step, step == parts - 1) for k in range(global_batches) for step in range(parts)]
    progress = LoopProgress()
    for call in calls.split(", "):
        call, _, expected = call.partition(" = ")
        name, *numbers = call.split()
        sources = [known[int(number)] for number in numbers]
        if name == "draw":
            for each in sources:
                progress.draw(each)
        elif name in ("forward", "backward"):
            found = getattr(progress, name)(sources)
            if expected:
                assert found is (None if expected == "-" else known[int(expected)]), call
        elif name == "step":
            due = progress.step()
            assert not expected or due == (expected == "due"), call
            if due:
                progress.finish()
        elif name == "begin":
            progress.begin()
            assert progress.must_drop
        else:
            answer = progress.is_last()
            assert name == "last" and answer == (expected == "yes"), call
    return progress


def usual(number: int) -> str:
    return f"draw {number}, forward = {number}, backward = {number}, step"


def test_the_micro_batch_of_each_pass_is_found() -> None:
    for parts, calls in (
        (2, f"{usual(0)} = not, {usual(1)} = due, {usual(2)} = not, {usual(3)} = due"),
        # A batch that is drawn ahead is not taken for the current one.
        (
            3,
            "draw 0 1, forward 0 = 0, backward = 0, step = not, draw 2, last = no, forward 1 = 1, backward 1 = 1, "
            "step = not, forward 2 = 2, last = yes, backward = 2, step = due",
        ),
        # Several passes with a batch: the model is called twice, then a second loss has its own forward pass.
        (
            2,
            "draw 0, forward = 0, forward = 0, backward = 0, backward = 0, forward 0 = 0, backward 0 = 0, step = not, "
            f"{usual(1)} = due",
        ),
        # Losses show which of several forward passes they belong to.
        (2, "draw 0 1, forward 0, forward 1, backward 1 = 1, backward 0 = 0"),
        # An epoch that is left in a global batch drops its gradients.
        (2, f"{usual(0)}, begin, {usual(2)} = not, {usual(3)} = due"),
        # Whole global batches may be accumulated, trained with again, or skipped.
        (1, f"draw 0, forward = 0, backward = 0, {usual(1)} = due"),
        (1, f"{usual(0)} = due, forward 0 = 0, backward = 0, step = due, forward 0 = 0, backward = 0, step = due"),
        (2, "draw 0 1 2, forward 2 = 2"),
        # A loop that asks for the last micro-batch may step there only.
        (
            2,
            "draw 0, forward, backward, last = no, draw 1, forward, backward, last = yes, "
            "draw 2, forward, backward, last = no, draw 3, forward, backward, last = yes, step = due",
        ),
        # Passes without a batch of the loader change nothing.
        (1, f"forward = -, {usual(0)} = due, forward = -, {usual(1)} = due"),
    ):
        assert not play(calls, parts).must_drop


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


def test_the_share_of_a_batch_is_known_by_shapes() -> None:
    whole = MicroBatch(4, 8, 0, 0, False, shapes=((4, 3), (4,)))
    inputs = tagged(torch.ones(4, 3), whole)
    passed = (inputs, inputs[:1], [inputs[:1], inputs[:3]], inputs.sum(), inputs @ torch.ones(3, 2))
    assert [share_of_samples(whole, each) for each in passed] == [1.0, 0.25, 0.75, 1.0, 1.0]


def test_batches_of_all_types_know_their_micro_batch() -> None:
    for batch in (
        torch.ones(2),
        [torch.ones(2), 3, "text"],
        (torch.ones(2), [torch.ones(2)]),
        {"inputs": {"ids": torch.ones(2)}, "n": None},
        Pair(torch.ones(2), torch.ones(2)),
        Record(torch.ones(2)),
        UserDict(ids=torch.ones(2)),
    ):
        marked = tagged(batch, ONE)
        assert isinstance(marked, type(batch)) and micro_batches_of(marked) == (ONE,)
        plain = untagged(marked)
        assert isinstance(plain, type(batch)) and micro_batches_of(plain) == ()

    # Objects that cannot be changed are left as they are.
    for other in (FrozenRecord(torch.ones(2)), 7, "text", None):
        assert tagged(other, ONE) is other and micro_batches_of(other) == ()


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

    # A compiled loss can be computed from a batch.
    labels = tagged(torch.tensor([0, 1]), ONE)
    compiled = torch.compile(lambda logits, targets: cross_entropy(logits, targets), backend="eager")
    logits = torch.randn(2, 3)
    torch.testing.assert_close(untagged(compiled(logits, labels)), cross_entropy(logits, untagged(labels)))
