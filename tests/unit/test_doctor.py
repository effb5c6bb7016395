"""What the doctor says of windows of numbers, which is a pure function."""

import itertools
import random
from dataclasses import replace

import pytest

from colossal_hetero.doctor import Link, Window, advice, balanced_seconds, diagnose, needs_links

WINDOWS = 30
HEALTHY = Window(number=0, wall=0.1, forward=0.03, forward_cpu=0.03, rest_cpu=0.06, loader=0.001)
"""On an idle core, with 9 ms of communication."""


def ranks_of(*each: Window, noise: float = 0.02, seed: int = 0) -> list[list[Window]]:
    """Windows of ranks around these means: each rank has noise of its own."""
    draw = random.Random(seed)
    times = ("wall", "forward", "forward_cpu", "rest_cpu", "loader", "delay", "gpu", "gpu_forward")

    def window(mean: Window, number: int) -> Window:
        factor = 1 + noise * draw.gauss(0, 1)
        return replace(mean, number=number, **{name: getattr(mean, name) * factor for name in times})

    return [[window(mean, number) for number in range(WINDOWS)] for mean in each]


def on_gpu(gpu: float, host: float = 0.01) -> Window:
    return Window(number=0, wall=0.1, forward=host, forward_cpu=host, gpu=gpu, gpu_forward=gpu)


BUSY = replace(HEALTHY, wall=0.19, forward=0.06, forward_cpu=0.06, rest_cpu=0.12)
THROTTLED = replace(HEALTHY, wall=0.19, forward=0.06, delay=0.09)
ASLEEP = replace(HEALTHY, wall=0.19, forward=0.12)
LOADING = replace(HEALTHY, wall=0.19, loader=0.09)
PAGING = replace(HEALTHY, wall=0.19, forward=0.12, faults=200.0)
WAITING = replace(HEALTHY, wall=0.19)


@pytest.mark.parametrize("slow", range(3))
@pytest.mark.parametrize(
    ("fault", "fast", "cause", "word"),
    [
        (BUSY, WAITING, "compute", "computes all the time"),
        (THROTTLED, WAITING, "compute", "50% of a core"),
        (ASLEEP, WAITING, "compute", "sleeps"),
        (LOADING, WAITING, "loader", "num_workers"),
        (PAGING, WAITING, "memory", "200 pages"),
        (replace(on_gpu(0.03), retries=1.0), on_gpu(0.01), "memory", "micro-batch"),
        (on_gpu(0.03), on_gpu(0.015), "compute", "throttled device"),
        (on_gpu(0.03, host=0.03), on_gpu(0.015), "host", "idle"),
    ],
)
def test_the_slow_rank_and_its_cause_are_found(fault: Window, fast: Window, cause: str, word: str, slow: int) -> None:
    found = diagnose(ranks_of(*(fault if rank == slow else fast for rank in range(3))))
    assert [(each.cause, each.ranks) for each in found] == [(cause, (slow,))]
    (sentence,) = advice(found, 0.19)
    assert sentence.startswith(f"Rank {slow} is slow: {cause}.") and word in sentence
    assert 0 < found[0].predicted_seconds < 0.19


def test_nothing_is_said_of_equal_ranks_noise_and_few_windows() -> None:
    for noise, seed in itertools.product([0.0, 0.05, 0.3], range(20)):
        assert diagnose(ranks_of(*[HEALTHY] * 4, noise=noise, seed=seed)) == []
    assert diagnose(ranks_of(WAITING, replace(WAITING, rest_cpu=0.065))) == []
    assert diagnose([windows[:4] for windows in ranks_of(WAITING, BUSY)]) == []
    assert diagnose(ranks_of(BUSY)) == []
    assert advice([], 0.1) == ["No rank is slower than the others by more than noise."]
    # Skewed noise: rank 0 takes 20 ms longer in three windows of five, and yet its median is the smaller one.
    works = [(0.06, 0.04), (0.04, 0.02), (0.08, 0.06), (0.03, 0.09), (0.03, 0.09)] * 6
    numbered = [[replace(WAITING, number=number, rest_cpu=each) for each in work] for number, work in enumerate(works)]
    assert diagnose([list(windows) for windows in zip(*numbered, strict=True)]) == []


def test_the_prediction_is_total_work_over_total_speed() -> None:
    # Work times 90 and 180 ms: 2 / (1/90 + 1/180) = 120 ms; then 1 ms of loading and 9 ms of communication.
    assert balanced_seconds(ranks_of(WAITING, BUSY, noise=0.0)) == pytest.approx(0.120 + 0.001 + 0.009)
    for parallelism, name in {"data": "HeteroZeroPlugin", "tensor": "HeteroHybrid", "pipeline": "plan"}.items():
        (finding,) = diagnose(ranks_of(WAITING, BUSY), parallelism)
        assert name in finding.remedy


TALKING = replace(HEALTHY, wall=0.3)


def links_between(count: int, slow: set[tuple[int, int]], seconds: float = 0.002) -> list[Link]:
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return [Link(pair, 1e-4, 0.080 if pair in slow else seconds) for pair in pairs]


def test_the_slow_links_are_found() -> None:
    for count, slow, ranks in (
        (4, {(0, 2), (1, 2), (2, 3)}, (2,)),
        (4, {(1, 3)}, (1, 3)),
        (3, {(0, 1), (0, 2)}, (0,)),
        (2, {(0, 1)}, ()),
        (3, {(0, 1), (0, 2), (1, 2)}, ()),
    ):
        windows = ranks_of(*[TALKING] * count)
        assert needs_links(windows)
        assert diagnose(windows) == []  # not before they are measured
        (finding,) = diagnose(windows, links=links_between(count, slow))
        assert (finding.cause, finding.ranks) == ("network", ranks)
        assert "1 MB takes 80 ms" in finding.why
