"""Uneven batches: how they are divided, running out of memory in training, and labels that a loss may leave out."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from colossal_hetero import BatchConfig
from colossal_hetero.data_parallel import attach
from colossal_hetero.data_parallel.attach import OutOfMemoryGuard
from colossal_hetero.data_parallel.batch_balancer import changes_in_words, divider_of, division_in_words
from colossal_hetero.data_parallel.loss_weights import refuse_ignored
from colossal_hetero.planner import Curve, allocate
from colossal_hetero.planner.batches.batch_profile import DeviceProfile
from colossal_hetero.planner.batches.closed_loop import Speed
from tests.support.batch_profiles import device, profile


def measured(factor: float) -> DeviceProfile:
    points = [{"batch": batch, "seconds": factor * (0.05 + 0.05 * batch)} for batch in (1, 16, 64)]
    return device(points=points, max_batch=64, step_seconds=0.1 * factor)


@pytest.mark.parametrize(("factor", "samples"), [(1.06, [32, 32]), (2.0, [43, 21])])
def test_equal_devices_get_equal_parts_unless_they_differ_clearly(factor: float, samples: list[int]) -> None:
    both = profile(kinds=[measured(1.0), measured(factor)], ranks=[0, 1], links=[])
    divider = divider_of(BatchConfig(global_batch_size=64), both, 1)
    assert [share.samples for share in divider.divide((Speed(), Speed()), 64).shares] == samples
    assert divider.step_seconds == pytest.approx([0.05 * (1 + factor) / 2] * 2 if factor < 2 else [0.05, 0.1])


CURVE = Curve.from_seconds([1.0, 2.0, 3.0, 4.0])


def test_a_division_names_groups_of_equal_ranks() -> None:
    allocation = allocate([CURVE, CURVE, Curve(2.0 * CURVE.seconds)], 10, 1)
    words = division_in_words(allocation, ["A", "A", "B"])
    assert words == "of each global batch of 10: ranks 0-1 (A) 4; rank 2 (B) 2"
    words = division_in_words(allocate([CURVE, CURVE], 16, 1), ["A", "B"])
    assert words == (
        "of each global batch of 16: rank 0 (A) 8 in 2 micro-batches of at most 4; "
        "rank 1 (B) 8 in 2 micro-batches of at most 4"
    )
    # Changes name the ranks whose samples change.
    before, after = allocate([CURVE] * 2, 6, 1), allocate([CURVE, Curve(2.0 * CURVE.seconds)], 6, 1)
    assert changes_in_words(before, after, [1.0, 2.0], ["A", "B"]) == (
        "global batches of 6 are divided again: rank 0 (A) takes 1.00 times as long as before: 3 → 4 samples; "
        "rank 1 (B) takes 2.00 times as long as before: 3 → 2 samples"
    )
    assert changes_in_words(before, before, [1.1, 1.0], ["A", "B"]) is None


@pytest.fixture(autouse=True)
def outside_of_any_group() -> Any:
    with patch.object(attach, "MIN_BYTES", 1), patch.object(attach.dist, "get_rank", lambda: 1):
        yield


class RunsOut(nn.Module):
    """Raises an out-of-memory error as long as ``left`` is above 0, in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.left > 0 and self.training:
            self.left -= 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return inputs


def guarded(may_repeat: bool) -> tuple[nn.Module, RunsOut, Any]:
    torch.manual_seed(0)
    runs_out = RunsOut()
    layers = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.GELU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(5 * 36, 4)
    model = nn.Sequential(*layers, runs_out)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    loader: Any = SimpleNamespace(current=SimpleNamespace(samples=3, global_batch=7))
    guard = OutOfMemoryGuard(loader, may_repeat=may_repeat)
    guard.attach(model, optimizer)  # type: ignore[arg-type]
    return model, runs_out, optimizer


def test_a_repeated_pass_gives_the_same_result(caplog: pytest.LogCaptureFixture) -> None:
    inputs = torch.randn(3, 3, 8, 8)
    found = []
    for failures in (0, 1):
        model, runs_out, optimizer = guarded(True)
        runs_out.left = failures
        torch.manual_seed(2)
        losses = []
        for _ in range(3):
            loss = model(inputs).square().mean()
            optimizer.backward(loss)
            losses.append(loss.detach())
        found.append([*losses, *(each.grad for each in model.parameters()), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    told = caplog.text
    assert told.count("rank 1 ran out of memory in the forward pass of a micro-batch of 3 samples") == 1
    assert "nothing is lost" in told and "max_micro_batch=2" in told


def test_what_cannot_be_repeated_says_what_happened_and_other_errors_are_left_alone() -> None:
    images = torch.randn(3, 3, 8, 8)
    for may_repeat, failures, words in (
        (False, 1, r"rank 1 .* forward pass of a micro-batch of 3 samples of global batch 7"),
        (True, 2, "the pass cannot be repeated"),
    ):
        model, runs_out, _ = guarded(may_repeat)
        runs_out.left = failures
        with pytest.raises(RuntimeError, match=words):
            model(images)
    model, runs_out, optimizer = guarded(True)
    with pytest.raises(RuntimeError, match="size"):
        model(torch.randn(3, 4, 8, 8))
    runs_out.left = 1
    assert model.eval()(images).shape == (3, 4)
    with pytest.raises(AttributeError):
        optimizer.backward(None)


@pytest.mark.parametrize("as_batch", [lambda labels: {"labels": labels}, lambda labels: (labels.float(), labels)])
def test_maps_with_pixels_without_a_class_are_refused(as_batch: Any) -> None:
    """255 may be a token."""
    check, labels = refuse_ignored(None), torch.zeros(2, 4, 4, dtype=torch.long)
    check(as_batch(labels))
    labels[1, 2, 3] = 255
    check(as_batch(labels.flatten(1)))
    with pytest.raises(RuntimeError, match="a batch has labels of 255, which the samples that were compared"):
        check(as_batch(labels))
