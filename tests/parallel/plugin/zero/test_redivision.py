"""Global batches that are divided again in training: what is measured, and what follows from it."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from colossal_hetero.colossalai_support import accelerator
from colossal_hetero.data_parallel import busy_timer
from colossal_hetero.data_parallel.busy_timer import BusyTimer, TimedGlobalBatch
from tests.support.checks import of_all_ranks, on
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import make_step
from tests.support.zero_runs import Net, Numbered, boosted, make_optimizer, sizes_by_rank, unmeasured

FORWARD, BACKWARD, DATA, STEP, WAITING = 1.0, 2.0, 0.5, 7.0, 100.0
"""What a sample, an optimizer step and a collective take, in seconds of the test's clock."""


class Clock:
    now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SlowNet(Net):
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
    real = {name: getattr(dist, name) for name in busy_timer.COLLECTIVES if hasattr(dist, name)}

    def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            clock.advance(WAITING)
            return collective(*args, **kwargs)

        vars(run).pop("tells_waits", None)
        return run

    slowed = {name: slow(collective) for name, collective in real.items()}
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    with patch.multiple(dist, **slowed), patch.object(accelerator, "time", time):
        yield clock


@unmeasured
def measure(stage: int, division: list[list[int]]) -> list[TimedGlobalBatch]:
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
            make_step(optimizer, loss)
            if loader.current.is_last:
                clock.advance(1000.0)  # as an evaluation
        return plugin.batch_balancer._timer.take()


@on(2, (0, 1, 2, 3), [[5], [3]])
@on(2, (0, 1, 2, 3), [[2, 2, 1], [1, 1, 1]])
@on(3, (1, 3), [[2, 1], [3, 0], [1, 1]])
def the_timer_tells_work_from_waiting(stages: tuple[int, ...], division: list[list[int]]) -> None:
    for stage in stages:
        timed = measure(stage, division)
        sizes = [tuple(sizes_by_rank(division, samples)[dist.get_rank()]) for samples in (8, 8, 8, 5)]
        assert [each.sizes for each in timed] == sizes, stage
        for each in timed:
            samples = sum(max(size, 1) for size in each.sizes)
            assert each.work_seconds == pytest.approx((FORWARD + BACKWARD) * samples), (stage, each)
            assert each.data_seconds == pytest.approx(DATA * samples), (stage, each)
            assert each.step_seconds == pytest.approx(STEP), (stage, each)
            # The loop's own collective and the end of each backward pass.
            assert each.waiting_seconds >= 2 * WAITING * len(each.sizes), (stage, each)


@on(3)
def collectives_inside_a_replica_are_its_work() -> None:
    inside, between, rank = dist.new_group([0, 1]), dist.new_group([1, 2]), dist.get_rank()
    with moved_clock():
        timer = BusyTimer([0, 0, 1])
        timer.before_batch()
        timer.after_batch(1)
        if rank < 2:
            dist.all_reduce(torch.zeros(1), group=inside)
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), inside)
        if rank > 0:
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, between, async_op=True).wait()
        optimizer = SimpleNamespace(backward=lambda loss: None, step=lambda: None)
        timer.attach(optimizer)
        optimizer.step()
        (timed,) = timer.take()
    assert (timed.work_seconds, timed.waiting_seconds) == (2 * WAITING * (rank < 2), WAITING * (rank > 0))


# Decisions are tested in tests/unit/planner/batches/test_closed_loop.py.


@unmeasured
def change_speed(
    kind: int | str, slow: int, slowdowns: list[float], check_every: int | None = None
) -> tuple[list[list[int]], Any, list[float]]:
    """Train an epoch for each of ``slowdowns``, of which so many measure that rank ``slow`` is so slow. Returns the
    samples of each rank after each epoch, the plugin, and the iterations that were reported."""
    given: list[dict[str, float]] = []
    reports = dict(on_report=given.append, report_every=3)
    run = boosted(kind, loader=dict(shuffle=True), check_every=check_every, **reports)
    plugin, _, model, optimizer, criterion, loader, _ = run
    timed: list[TimedGlobalBatch] = []

    def take() -> list[TimedGlobalBatch]:
        taken = list(timed)
        timed.clear()
        return taken

    plugin.batch_balancer._timer.take = take
    samples = []
    for slowdown in slowdowns:
        ids: list[int] = []
        sizes: list[int] = []
        for inputs, targets in loader:
            sizes.append(loader.current.samples)
            ids += inputs[:, 7].long().tolist() if loader.current.samples else []
            optimizer.backward(criterion(model(inputs), targets))
            if loader.current.is_last:
                work = sum(max(size, 1) for size in sizes) * (slowdown if dist.get_rank() == slow else 1.0)
                timed.append(TimedGlobalBatch(tuple(sizes), work, 0.0, 50.0, 0.0))
                sizes = []
            make_step(optimizer)
        assert sorted(itertools.chain(*of_all_ranks(ids))) == list(range(len(Numbered())))
        samples.append([share.samples for share in plugin.batch_balancer.allocation.shares])
    return samples, plugin, [numbers["iteration"] for numbers in given]


def share_of(slow: int, samples: int, others: int) -> list[int]:
    return [samples, others] if slow == 0 else [others, samples]


@on(2)
def batches_are_divided_again_after_a_change_of_speed() -> None:
    cases: list[dict[str, Any]] = [
        dict(kind=stage, slow=slow, check_every=check_every)
        for stage in (0, 1, 2, 3)
        for slow in (0, 1)
        for check_every in (None, 1, 3)
        if IS_THOROUGH or (slow == stage % 2 and check_every == (None, 1, 3)[stage % 3])
    ]
    for case in (*cases, dict(kind="hybrid", slow=1, check_every=1)):
        samples, plugin, _ = change_speed(slowdowns=[1, 3, 3, 3, 1, 1, 1], **case)
        assert [samples[epoch] for epoch in (0, 3, 6)] == [[4, 4], share_of(case["slow"], 2, 6), [4, 4]], case
        assert plugin.batch_balancer.reallocations == 2, case


@on(2, 0, 0.75, (5, 3), 3.75)
@on(2, 1, 1.34, (3, 5), 5.0)
def a_wrong_profile_is_corrected_and_reported(slow: int, factor: float, fitted: tuple[int, int], best: float) -> None:
    """With one of eight samples moved, a global batch takes 3.75 s instead of 4, or 5 s instead of 5.36."""
    samples, plugin, given = change_speed(1, slow, [factor] * 2)
    expected, report = share_of(slow, *fitted), plugin.report()
    assert given == ([3, 6] if dist.get_rank() == 0 else [])  # after so many of eight steps
    batches = report.batches
    assert samples[1] == [share.samples for share in batches.shares] == expected and batches.changes == 1
    assert batches.shares[slow].slowdown == pytest.approx(factor, rel=0.01)
    # The slower rank takes 4 samples in equal parts.
    assert batches.equal_seconds == pytest.approx(4 * max(factor, 1.0), rel=0.01)
    assert batches.iteration_seconds == pytest.approx(best, rel=0.01)
    text = " ".join(str(report).split())
    assert "by rank (times in s" in text and "times as long). It was divided again 1 time." in text
    assert report.numbers()[f"batches/rank{slow}/samples"] == expected[slow]
