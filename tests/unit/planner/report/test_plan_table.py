"""A plan as text and as a picture: its table, its layout on one line, commands that run it, bars of its stages."""

import ast
import io
from itertools import pairwise, product
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from colossal_hetero.cli.frameworks import training_call
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.cost.simulate import simulate_plan, slowed
from colossal_hetero.planner.report.plan_picture import MAX_LANES, lanes, plot_plan
from colossal_hetero.planner.report.plan_table import one_line, render, rows, short_ranks
from tests.support.figures import saved_figures
from tests.support.plans import chunked, plan, replica, stage, unequal


def printed(*candidates: RankedPlan, width: int = 140) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(render(candidates))
    return stream.getvalue()


def large(replicas: int = 16, stages: int = 32) -> Plan:
    return plan(
        *(
            replica(
                *(stage(s, s + 1, (2 * (r * stages + s), 2 * (r * stages + s) + 1), "A100-80") for s in range(stages)),
                micro_batches=64,
            )
            for r in range(replicas)
        )
    )


def on_nodes(*nodes: tuple[str, int]) -> Plan:
    names = [name for name, ranks in nodes for _ in range(ranks)]
    return plan(
        replica(*(stage(rank, rank + 1, (rank,), node=name) for rank, name in enumerate(names)), micro_batches=32)
    )


PLANS = {
    "equal": plan(iteration_seconds=1.23, precision="bf16"),
    "unequal": unequal(),
    "similar": plan(*(replica(stage(0, 6, (r,), forward_seconds=s)) for r, s in enumerate((1.0, 1.0001, 1.1)))),
    "large": large(),
    "40 kinds": plan(replica(*(stage(s, s + 1, (s,), f"kind-{s}") for s in range(40)))),
    "40 replicas": plan(*(replica(stage(0, 6, (r,), f"kind-{r}")) for r in range(40))),
    "recomputing": plan(replica(stage(0, 1, (0,)), stage(1, 6, (1,), recompute=True))),
    "interleaved": chunked("interleaved"),
    "zbv": chunked("zbv"),
    "few micro-batches": plan(replica(stage(0, 4, (0,)), stage(4, 6, (1,)), micro_batches=1)),
    "three nodes": on_nodes(("a", 2), ("b", 2), ("c", 1)),
    "ten nodes": on_nodes(*((f"a{index}", 2) for index in range(9)), ("b", 1)),
    "other devices": plan(replica(stage(0, 3, (4,)), stage(3, 6, (6,)))),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_in_words(name: str) -> None:
    """Its line, the rows of its table, and how to run it: as in ``plans.txt``."""
    made, golden = PLANS[name], Path(__file__).with_name("plans.txt").read_text(encoding="utf-8")
    cells = [(short_ranks(row.replicas), row.device, short_ranks(row.ranks), row.layers) for row in rows(made)]
    call = training_call(made, "my plan.json", overlap=name == "unequal")
    text = "\n".join([one_line(made), *map(" | ".join, cells[:9]), call])
    assert text == golden.partition(f"=== {name}\n")[2].partition("\n===")[0].rstrip("\n")
    ast.parse(call.partition("\n\n")[2])


def test_the_next_plans_are_listed_with_reasons_and_names_are_not_markup() -> None:
    odd = plan(replica(stage(0, 6, (0,), "[bold]T4[/x]")), notes=("[red]note[/q]",))
    text = printed(RankedPlan(odd, "first [b]"), RankedPlan(chunked(), "because [c]"))
    for words in ("[bold]T4[/x]", "[red]note[/q]", "because [c]", "first [b]"):
        assert words in text
    assert "[0, 2), [3, 5)" in printed(RankedPlan(chunked(), ""))


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
        stage(0, 4, (0, 1)), stage(4, 6, (2, 3), forward_seconds=0.06, backward_seconds=0.12, update_seconds=0.003)
    )
    assert slow.plan.replicas[0].pipeline_seconds == pytest.approx(expected.pipeline_seconds)
    assert slow.plan.iteration_seconds == pytest.approx(expected.pipeline_seconds + made.synchronization_seconds)
    # The slowest rank of a group counts, so a faster one changes nothing.
    assert simulate_plan(made, {2: 2.0, 3: 3.0}).seconds == slow.seconds
    assert slowed(made, {}) is made
    assert simulate_plan(made, {1: 0.5, 0: 1.0}).seconds == simulate_plan(made).seconds


def test_pictures_have_rows_of_stages_with_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = saved_figures(monkeypatch)
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
    # Large and slowed plans, in empty files.
    save = lambda figure, file, **_: (figures.append(figure), Path(file).touch())  # noqa: E731
    monkeypatch.setattr(Figure, "savefig", save)
    many = replica(*(stage(s, s + 1, (s,)) for s in range(60)), micro_batches=2)
    plot_plan(simulate_plan(plan(many)), tmp_path / "many.pdf")
    assert all(len(axis.get_yticklabels()) == MAX_LANES for axis in figures[1].axes)
    assert f"{MAX_LANES} of 60 stages" in figures[1].get_suptitle()
    plot_plan(simulate_plan(plan(), {1: 2.0}), tmp_path / "slow.svg")
    assert "rank 1 slowed 2 ×" in figures[2].get_suptitle()
    # Replica 1 is not slow, so it has its own rows.
    assert len(figures[2].axes[0].get_yticklabels()) == 4
