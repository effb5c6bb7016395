"""The closed loop that divides global batches again, on simulated replicas."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from colossal_hetero.planner import Curve
from colossal_hetero.planner.batches.closed_loop import PATIENCE, BatchDivider, GlobalBatchTime, Redivision
from tests.support.random_examples import IS_THOROUGH
from tests.support.simulated_replicas import SimulatedReplica, Simulation

CHECK_EVERY = 5


def replicas(count: int, sample_seconds: float) -> list[SimulatedReplica]:
    return [SimulatedReplica(sample_seconds) for _ in range(count)]


def best_wall(simulation: Simulation) -> float:
    return simulation.mean_wall(simulation.best_division())


def slowness(simulation: Simulation, first: int, last: int) -> list[float]:
    """What iterations take in the divisions of these iterations, relative to the best fixed one
    for the present devices, without noise."""
    best, known = best_wall(simulation), dict[tuple[int, ...], float]()
    for samples in simulation.divisions[first:last]:
        if samples not in known:
            known[samples] = simulation.mean_wall(samples) / best
    return [known[samples] for samples in simulation.divisions[first:last]]


def overshoot(simulation: Simulation, first: int, last: int) -> float:
    """The largest slowness of a division in which a replica got or lost more samples than in the best one."""
    before, best = simulation.divisions[first - 1], simulation.best_division()
    largest = 1.0
    for samples, slow in zip(simulation.divisions[first:last], slowness(simulation, first, last), strict=True):
        moves = [(new - old, wanted - old) for old, new, wanted in zip(before, samples, best, strict=True)]
        if any(abs(moved) > abs(wanted) and moved * wanted > 0 for moved, wanted in moves):
            largest = max(largest, slow)
    return largest


def put_a_quota_on_and_off(
    count: int, slow: int, quota: float, seconds: float, seed: int, noise: float = 0.02
) -> list[tuple[list[float], float]]:
    """Training in which a replica is under a quota for 40 iterations: :func:`slowness` and :func:`overshoot` under the
    quota and after it.

    The quota comes right after a check, or between two checks.
    """
    devices = replicas(count, seconds * count / 192)
    simulation = Simulation(devices, 192, noise=noise, seed=seed, check_every=CHECK_EVERY)
    first = 20 + seed % CHECK_EVERY

    def before(iteration: int) -> None:
        devices[slow].quota = quota if first <= iteration < first + 40 else 1.0

    simulation.train(first + 80, before)
    results = []
    for begin, share in ((first, quota), (first + 40, 1.0)):
        devices[slow].quota = share
        results.append((slowness(simulation, begin, begin + 40), overshoot(simulation, begin, begin + 40)))
    return results


AFTER = 3 * CHECK_EVERY + 1
"""Iterations until three checks were made and the third division is used; a check takes place before the first of them
if the speed changes between two checks."""


def paired(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All combinations with all seeds if thorough, else each value once or more, each case with another seed."""
    if IS_THOROUGH:
        return list(itertools.product(*map(dict.fromkeys, dimensions), range(20)))
    longest = max(map(len, dimensions))
    return [(*(each[case % len(each)] for each in dimensions), case) for case in range(longest)]


@pytest.mark.parametrize(
    ("seconds", "quota", "place", "seed"),
    paired((0.5, 1.0, 2.0), (0.5, 0.25), ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2))),
)
def test_a_quota_that_is_put_on_and_taken_off(seconds: float, quota: float, place: tuple[int, int], seed: int) -> None:
    for slow_by, passed in put_a_quota_on_and_off(*place, quota, seconds, seed):
        # 3 %, and two percent of a small step that is being tried.
        assert max(slow_by[AFTER:]) <= 1.05, slow_by[AFTER:]
        assert passed <= 1.05


def test_slow_data_is_divided_by() -> None:
    """Loading takes 1.6 times as long as computing on one replica: 24 + 24 samples would take 2.6 times as long as one
    replica computes, the best division 1.44 times as long."""
    devices = replicas(2, 0.3 / 24)
    devices[1].data_seconds = 1.6 * 0.3 / 24
    simulation = Simulation(devices, 48, noise=0.01)
    assert [share.samples for share in simulation.loop.allocation.shares] == [24, 24]
    simulation.train(20)
    assert slowness(simulation, 19, 20)[0] <= 1.03
    assert simulation.loop.speeds[1].data_seconds == pytest.approx(devices[1].data_seconds, rel=0.1)


def loop(ranks: int = 2, min_gain: float = 0.02, samples: int = 12) -> Redivision:
    curve = Curve.from_seconds([float(n) for n in range(1, samples + 1)])
    return Redivision(BatchDivider([curve] * ranks, 1), samples, min_gain)


def constant(speeds: Sequence[float], redivision: Redivision, count: int) -> list[list[GlobalBatchTime]]:
    shares = redivision.allocation.shares
    return [
        [GlobalBatchTime(float(share.samples), share.samples, speed * share.samples, 0.0)] * count
        for speed, share in zip(speeds, shares, strict=True)
    ]


def test_what_does_not_lead_to_a_new_division() -> None:
    redivision = loop()
    assert not redivision.observe(constant([1.0, 3.0], redivision, 2))
    assert redivision.observe(constant([1.0, 3.0], redivision, 1))  # together they are enough
    for speeds, count, options in (
        ([0.001, 0.003], 10, {}),  # too short
        ([2.0, 2.0, 2.0], 10, {"ranks": 3}),  # equal slowdowns of all
        ([1.0, 1.3], 10, {"min_gain": 0.4}),
    ):
        redivision = loop(**options)
        assert not redivision.observe(constant(speeds, redivision, count))
    assert redivision.observe(constant([1.0, 3.0], redivision, 10))


def test_after_a_wrong_step_a_replica_is_not_believed_for_longer() -> None:
    """The second replica looks a fifth faster while it waits; with one sample more it is as slow as before. It looks
    faster again, and is believed only after the checks for which it is not, and those before an optimistic speed is."""
    redivision, steps = loop(samples=200), []
    for look in [1.0, 0.8, 1.0, *[0.8] * (2 * PATIENCE)]:
        steps.append(redivision.observe(constant([1.0, look], redivision, 5)))
        if len(steps) == 2:
            assert [share.samples for share in redivision.allocation.shares] == [99, 101]
    assert [check for check, is_step in enumerate(steps) if is_step] == [1, 2 + 2 * PATIENCE]
