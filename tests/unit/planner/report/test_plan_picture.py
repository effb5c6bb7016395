"""Pictures: the bars of every stage of a simulated plan, long iterations in two windows, and a front of prices."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan, slowed
from colossal_hetero.planner.report.plan_picture import MAX_LANES, lanes, plot_plan
from tests.support.figures import saved_figures
from tests.unit.planner.plans.test_plan import chunked, plan, replica, stage
from tests.unit.planner.report.test_plan_table import large, unequal


def long() -> Plan:
    """A plan of two stages with 300 micro-batches."""
    return plan(replica(stage(0, 4, (0,)), stage(4, 6, (1,), "T4"), micro_batches=300))


def test_every_chunk_of_every_micro_batch_is_in_its_lane() -> None:
    first, second = lanes(simulate_plan(chunked("interleaved")))
    assert first.name.endswith("layers 0-1 + 3-4") and second.name.endswith("layers 2 + 5")
    for lane in (first, second):
        bars = sorted((bar.kind, bar.chunk, bar.micro_batch) for bar in lane.bars if bar.kind != "update")
        assert bars == sorted(product(("forward", "backward"), (0, 1), range(8)))


@pytest.mark.parametrize("made", [plan(), unequal(), large(2, 5)], ids=["two", "unequal", "large"])
def test_every_micro_batch_is_in_every_stage_of_every_kind_of_replica(made: Plan) -> None:
    simulation = simulate_plan(made)
    rows = lanes(simulation)
    assert sorted({number for lane in rows for number in lane.replicas}) == list(range(len(made.replicas)))
    for lane in rows:
        first = made.replicas[lane.replicas[0]]
        timed = first.stages[lane.stage]
        for kind, seconds in (("forward", timed.forward_seconds), ("backward", timed.backward_seconds)):
            bars = [bar for bar in lane.bars if bar.kind == kind]
            assert [bar.micro_batch for bar in bars] == list(range(first.micro_batches))
            assert [bar.stop - bar.start for bar in bars] == pytest.approx([seconds] * first.micro_batches)
        for before, after in pairwise(lane.bars):
            assert before.stop <= after.start + 1e-9
        # Gradients are summed before the optimizer uses them.
        synchronization, update = lane.bars[-2:]
        assert (synchronization.kind, update.kind) == ("synchronization", "update")
        assert synchronization.stop - synchronization.start == pytest.approx(made.synchronization_seconds)
        assert synchronization.stop == update.start and update.stop == pytest.approx(simulation.seconds)
        assert update.stop - update.start == pytest.approx(timed.update_seconds)


def test_a_slow_rank_slows_its_group_and_the_stages_that_wait_for_it() -> None:
    made = plan(replica(stage(0, 4, (0, 1)), stage(4, 6, (2, 3))), replica(stage(0, 4, (4, 5)), stage(4, 6, (6, 7))))
    slow = simulate_plan(made, {3: 3.0})
    first, second = slow.timelines
    assert second.seconds == simulate_plan(made).timelines[1].seconds
    assert first.times.forward_seconds == pytest.approx([0.04, 3 * 0.02])
    assert first.times.backward_seconds == pytest.approx([0.08, 3 * 0.04])
    assert slow.seconds == pytest.approx(first.seconds + made.synchronization_seconds)
    # The same plan, made with the slower times.
    expected = replica(
        stage(0, 4, (0, 1)),
        stage(4, 6, (2, 3), forward_seconds=0.06, backward_seconds=0.12, update_seconds=0.003),
    )
    assert slow.plan.replicas[0].pipeline_seconds == pytest.approx(expected.pipeline_seconds)
    assert slow.plan.iteration_seconds == pytest.approx(expected.pipeline_seconds + made.synchronization_seconds)
    # The slowest rank of a group counts, so a faster one changes nothing.
    assert simulate_plan(made, {2: 2.0, 3: 3.0}).seconds == slow.seconds
    assert slowed(made, {}) is made
    assert simulate_plan(made, {1: 0.5, 0: 1.0}).seconds == simulate_plan(made).seconds


def test_invalid_simulations_are_rejected() -> None:
    with pytest.raises(ValueError, match="rank 9 is not in the plan, which uses ranks 0-3"):
        simulate_plan(plan(), {9: 2.0})
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"rank 0 cannot be .* times as slow"):
            simulate_plan(plan(), {0: factor})
    made = plan(replica(stage(0, 4, (0,)), stage(4, 6, (1,), "T4"), micro_batches=250_001))
    with pytest.raises(ValueError, match="1,000,004 passes are too many to simulate; at most 1,000,000"):
        simulate_plan(made)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    return saved_figures(monkeypatch)


def test_the_picture_has_a_row_per_stage_and_a_number_per_micro_batch(tmp_path: Path, figures: list[Figure]) -> None:
    path = tmp_path / "plan.svg"
    plot_plan(simulate_plan(unequal()), path)
    assert list(tmp_path.iterdir()) == [path]
    (axis,) = figures[0].axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [
        "A100-40, rank 0\nlayers 0-3",
        "V100-16, rank 1\nlayers 4-5",
        "T4, rank 2\nlayers 0-1",
        "T4, rank 3\nlayers 2-3",
        "T4, rank 4\nlayers 4-5",
    ]
    texts = [text.get_text() for text in axis.texts]
    assert "replica 0: 12 micro-batches" in texts and "replica 1: 4 micro-batches" in texts
    assert [text for text in texts if text.isdigit()].count("3") == 2 * 5
    assert [text for text in texts if text.isdigit()].count("11") == 2 * 2


def test_pictures_of_long_large_and_slowed_plans(tmp_path: Path, figures: list[Figure]) -> None:
    plot_plan(simulate_plan(long()), tmp_path / "long.png")
    assert (tmp_path / "long.png").read_bytes().startswith(b"\x89PNG")
    left, right = figures[0].axes
    assert left.get_xlim()[1] < right.get_xlim()[0]
    many = replica(*(stage(s, s + 1, (s,)) for s in range(60)), micro_batches=2)
    plot_plan(simulate_plan(plan(many)), tmp_path / "many.pdf")
    assert all(len(axis.get_yticklabels()) == MAX_LANES for axis in figures[1].axes)
    assert f"{MAX_LANES} of 60 stages" in figures[1].get_suptitle()
    plot_plan(simulate_plan(plan(), {1: 2.0}), tmp_path / "slow.svg")
    assert "rank 1 slowed 2 ×" in figures[2].get_suptitle()
    # Replica 1 is not slow, so it has its own rows.
    assert len(figures[2].axes[0].get_yticklabels()) == 4
