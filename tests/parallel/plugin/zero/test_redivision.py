"""Global batches that are divided again in training: what is measured, and what follows from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.utils.data import Dataset

import colossal_hetero.colossalai_support.accelerator
from colossal_hetero.data_parallel import busy_timer
from colossal_hetero.data_parallel.busy_timer import BusyTimer, TimedGlobalBatch
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import CLASSES, tiny_vit
from tests.support.zero_runs import Net, Numbered, boosted, make_optimizer, sizes_by_rank, unmeasured

FORWARD, BACKWARD, DATA, STEP, WAITING = 1.0, 2.0, 0.5, 7.0, 100.0
"""What a sample, an optimizer step and a collective take, in seconds of the test's clock."""


class NumberedImages(Dataset):
    """Images whose last value is their number."""

    def __len__(self) -> int:
        return len(Numbered())

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.zeros(3, 8, 8)
        image[-1, -1, -1] = index
        return image, index % CLASSES


# What is measured -------------------------------------------------------------------------------------------------


class Clock:
    """The clock of events on a CPU, which only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SlowNet(Net):
    """A model whose passes take time on the clock, and whose sum of gradients does too."""

    clock: Clock | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.clock is None or not self.training:
            return super().forward(inputs)
        self.clock.advance(FORWARD * len(inputs))
        outputs = super().forward(inputs)
        outputs.register_hook(lambda gradient: self._during_backward(len(inputs)))
        return outputs

    def _during_backward(self, samples: int) -> None:
        clock = self.clock
        assert clock is not None
        clock.advance(BACKWARD * samples)
        # DDP waits in a function of the same kind.
        Variable._execution_engine.queue_callback(lambda: clock.advance(WAITING))


class SlowData(Numbered):
    clock: Clock | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.clock is not None:
            self.clock.advance(DATA)
        return super().__getitem__(index)


@contextmanager
def moved_clock() -> Iterator[Clock]:
    """In the block, events are timed by the clock, on which every collective takes a while."""
    clock = Clock()
    real_time = colossal_hetero.colossalai_support.accelerator.time
    real = {name: getattr(dist, name) for name in busy_timer.COLLECTIVES if hasattr(dist, name)}

    def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            clock.advance(WAITING)
            return collective(*args, **kwargs)

        vars(run).pop("tells_waits", None)
        return run

    for name, collective in real.items():
        setattr(dist, name, slow(collective))
    colossal_hetero.colossalai_support.accelerator.time = SimpleNamespace(perf_counter=lambda: clock.now)  # type: ignore[assignment]
    try:
        yield clock
    finally:
        colossal_hetero.colossalai_support.accelerator.time = real_time
        for name, collective in real.items():
            setattr(dist, name, collective)


@unmeasured
def measure_each(cases: list[tuple[int, list[list[int]]]]) -> list[list[TimedGlobalBatch]]:
    return [measure(*case) for case in cases]


def measure(stage: int, division: list[list[int]]) -> list[TimedGlobalBatch]:
    """Train an epoch with this division; what the timer of this rank says."""
    torch.manual_seed(3)
    data, model = SlowData(), SlowNet()
    optimizer = make_optimizer(model, "sgd")
    options = dict(loader=dict(shuffle=True), division=division, reallocate_above=math.inf)
    with moved_clock() as clock:
        optimizer.register_step_post_hook(lambda *_: clock.advance(STEP))
        plugin, _, trained, optimizer, criterion, loader, _ = boosted(stage, model, optimizer, data, **options)
        model.clock = data.clock = clock
        for inputs, targets in loader:
            loss = criterion(trained(inputs), targets)
            dist.all_reduce(torch.zeros(1))  # as scripts do for their logs
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if loader.current.is_last:
                clock.advance(1000.0)  # as an evaluation
        return plugin.batch_balancer._timer.take()


@pytest.mark.parametrize("divisions", [[[[5], [3]], [[2, 2, 1], [1, 1, 1]]], [[[2, 1], [3, 0], [1, 1]]]])
def test_the_timer_tells_work_from_waiting(divisions: list[list[list[int]]]) -> None:
    ranks = len(divisions[0])
    cases = [(stage, division) for stage in ((0, 1, 2, 3) if ranks == 2 else (1, 3)) for division in divisions]
    for rank, of_rank in enumerate(run_ranks(ranks, measure_each, cases)):
        for (stage, division), timed in zip(cases, of_rank, strict=True):
            sizes = [tuple(sizes_by_rank(division, samples)[rank]) for samples in (8, 8, 8, 5)]
            assert [each.sizes for each in timed] == sizes, stage
            for each in timed:
                samples = sum(max(size, 1) for size in each.sizes)
                assert each.work_seconds == pytest.approx((FORWARD + BACKWARD) * samples), (stage, each)
                assert each.data_seconds == pytest.approx(DATA * samples), (stage, each)
                assert each.step_seconds == pytest.approx(STEP), (stage, each)
                # The loop's own collective and the end of each backward pass.
                assert each.waiting_seconds >= 2 * WAITING * len(each.sizes), (stage, each)


def collectives_in_replicas() -> tuple[float, float]:
    """Two collectives in a replica of ranks 0 and 1, and one between replicas: seconds of work and of waiting."""
    inside, between = dist.new_group([0, 1]), dist.new_group([1, 2])
    with moved_clock():
        timer = BusyTimer([0, 0, 1])
        timer.before_batch()
        timer.after_batch(1)
        if dist.get_rank() < 2:
            dist.all_reduce(torch.zeros(1), group=inside)
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), inside)
        if dist.get_rank() > 0:
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, between, async_op=True).wait()
        optimizer = SimpleNamespace(backward=None, step=lambda: None)
        optimizer.backward = lambda loss: None
        timer.attach(optimizer)
        optimizer.step()
        (timed,) = timer.take()
    return timed.work_seconds, timed.waiting_seconds


def test_collectives_inside_a_replica_are_its_work() -> None:
    assert run_ranks(3, collectives_in_replicas) == [(2 * WAITING, 0.0), (2 * WAITING, WAITING), (0.0, WAITING)]


# What follows from it ---------------------------------------------------------------------------------------------


@unmeasured
def change_speed_each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [change_speed(**case) for case in cases]


def change_speed(
    stage: int,
    slow: int,
    check_every: int | None = None,
    bias: float = 1.0,
    data_seconds: float = 0.0,
    is_hybrid: bool = False,
    slow_epochs: Sequence[int] = (),
    epochs: int = 2,
) -> dict[str, Any]:
    """Train, while rank ``slow`` is measured to be three times slower in some epochs."""
    given: list[dict[str, float]] = []
    options: dict[str, Any] = dict(loader=dict(shuffle=True), check_every=check_every)
    if is_hybrid:
        run = boosted("hybrid", tiny_vit(), data=NumberedImages(), zero_stage=stage, **options)
    else:
        run = boosted(stage, on_report=given.append, report_every=3, **options)
    plugin, _, model, optimizer, criterion, loader, _ = run
    is_slow, timed = dist.get_rank() == slow, list[TimedGlobalBatch]()

    def take() -> list[TimedGlobalBatch]:
        taken = list(timed)
        timed.clear()
        return taken

    plugin.batch_balancer._timer.take = take
    seen, samples = [], []
    for epoch in range(epochs):
        slowdown = (3.0 if is_slow and epoch in slow_epochs else 1.0) * (bias if is_slow else 1.0)
        ids: list[int] = []
        sizes: list[int] = []
        for inputs, targets in loader:
            sizes.append(loader.current.samples)
            ids += inputs.flatten(1)[:, -1].long().tolist() if loader.current.samples else []
            optimizer.backward(criterion(model(inputs), targets))
            if loader.current.is_last:
                count = sum(max(size, 1) for size in sizes)
                wait = data_seconds * count if is_slow else 0.0
                timed.append(TimedGlobalBatch(tuple(sizes), slowdown * count, wait, 50.0, 0.0))
                sizes = []
            optimizer.step()
            optimizer.zero_grad()
        seen.append(ids)
        samples.append([share.samples for share in plugin.batch_balancer.allocation.shares])
    return {
        "seen": seen,
        "samples": samples,
        "reallocations": plugin.batch_balancer.reallocations,
        "report": plugin.report(),
        "given": [numbers["iteration"] for numbers in given],
    }


def trained(cases: list[dict[str, Any]], ranks: int = 2) -> Iterator[tuple[dict[str, Any], tuple[dict[str, Any], ...]]]:
    """The cases, each with its results by rank. Asserts that each sample was seen once per epoch."""
    for case, results in zip(cases, zip(*run_ranks(ranks, change_speed_each, cases), strict=True), strict=True):
        for epoch in range(len(results[0]["seen"])):
            seen = sorted(each for result in results for each in result["seen"][epoch])
            assert seen == list(range(len(Numbered()))), case
        yield case, results


def share_of(slow: int, samples: int, others: int) -> list[int]:
    """The samples of two ranks of which this one has ``samples``."""
    return [samples, others] if slow == 0 else [others, samples]


def test_batches_are_divided_again_after_a_change_of_speed() -> None:
    cases: list[dict[str, Any]] = [
        {"stage": stage, "slow": slow, "check_every": check_every}
        for stage in (0, 1, 2, 3)
        for slow in (0, 1)
        for check_every in (None, 1, 3)
        if IS_THOROUGH or (slow == stage % 2 and check_every == (None, 1, 3)[stage % 3])
    ]
    cases.append({"stage": 0, "slow": 1, "check_every": 1, "is_hybrid": True})
    for case, results in trained([case | dict(slow_epochs=range(1, 4), epochs=7) for case in cases]):
        fitted = share_of(case["slow"], 2, 6)
        for result in results:
            assert [result["samples"][epoch] for epoch in (0, 3, 6)] == [[4, 4], fitted, [4, 4]], case
            assert result["reallocations"] == 2, case


def test_a_wrong_profile_is_corrected() -> None:
    """With one of eight samples moved, a global batch takes 3.75 s instead of 4, or 5 s instead of 5.36."""
    cases = [dict(stage=1, slow=slow, bias=bias) for slow, bias in ((0, 0.75), (1, 1.34))]
    for case, results in trained(cases):
        assert [result["given"] for result in results] == [[3, 6], []]  # after so many of eight steps, on rank 0
        expected = share_of(case["slow"], *((5, 3) if case["bias"] < 1 else (3, 5)))
        for result in results:
            assert result["samples"][1] == expected, case
            batches = result["report"].batches
            assert [share.samples for share in batches.shares] == expected and batches.changes == 1, case
            assert batches.shares[case["slow"]].slowdown == pytest.approx(case["bias"], rel=0.01)
            # The slower rank takes 4 samples in equal parts.
            assert batches.equal_seconds == pytest.approx(4 * max(case["bias"], 1.0), rel=0.01)
            assert batches.iteration_seconds == pytest.approx(3.75 if case["bias"] < 1 else 5.0, rel=0.01)
            text, numbers = str(result["report"]), result["report"].numbers()
            assert "by rank (times in s" in text and "times as long). It was divided again 1 time." in " ".join(
                text.split()
            )
            assert numbers[f"batches/rank{case['slow']}/samples"] == expected[case["slow"]]


def test_a_rank_with_slow_data_gets_fewer_samples_and_the_report_says_so() -> None:
    cases = [dict(stage=stage, slow=slow, data_seconds=2.0, epochs=3) for stage, slow in ((1, 0), (3, 1))]
    for case, results in trained(cases):
        for result in results:
            assert result["samples"][1] == share_of(case["slow"], 2, 6), case
            shares = result["report"].batches.shares
            assert shares[case["slow"]].data_seconds > 0 == shares[1 - case["slow"]].data_seconds, case


def test_three_ranks() -> None:
    """A rank that is three times slower gets 1 of 8 samples (3 s), and each other one at most 4."""
    common = dict(stage=1, check_every=1, slow_epochs=range(1, 5), epochs=9)
    for case, results in trained([common | {"slow": slow} for slow in (0, 2, 3)], 3):
        for result in results:
            slow = case["slow"]
            if slow == 3:
                assert result["reallocations"] == 0
            else:
                assert result["samples"][4][slow] == 1 and max(result["samples"][4]) == 4, case
                assert sorted(result["samples"][8]) == [2, 3, 3], case
