"""Plans and allocations as text and as pictures: tables, layouts on one line, commands that run them, bars."""

import ast
import io
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from colossal_hetero.cli.frameworks import training_call
from colossal_hetero.common.tables import ReportConsole, make_table, number_column, word_column
from colossal_hetero.planner.batches.allocation import LEAST_GAIN
from colossal_hetero.planner.cluster.topology import MeasuredLink
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan, slowed
from colossal_hetero.planner.report import batch_report
from colossal_hetero.planner.report.batch_report import compare, device_lines
from colossal_hetero.planner.report.plan_picture import MAX_LANES, lanes, plot_plan
from colossal_hetero.planner.report.plan_table import one_line, rows, short_ranks
from tests.support.batch_profiles import GIB, device, profile
from tests.support.figures import saved_figures
from tests.support.plans import chunked, plan, replica, stage, unequal


def printed(shown: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140).print(shown)
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
    stages = (stage(rank, rank + 1, (rank,), node=name) for rank, name in enumerate(names))
    return plan(replica(*stages, micro_batches=32))


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
    assert slow.seconds == pytest.approx(first.seconds + made.synchronization_seconds)
    # The same plan, made with the slower times.
    slower = stage(4, 6, (2, 3), forward_seconds=0.06, backward_seconds=0.12, update_seconds=0.003)
    expected = replica(stage(0, 4, (0, 1)), slower)
    assert first.seconds == pytest.approx(simulate_plan(plan(expected)).timelines[0].seconds)
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
    devices = ("A100-40, rank 0", "V100-16, rank 1", "T4, rank 2", "T4, rank 3", "T4, rank 4")
    rows = zip(devices, ("0-3", "4-5", "0-1", "2-3", "4-5"), strict=True)
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names == [f"{device}\nlayers {layers}" for device, layers in rows]
    texts = [text.get_text() for text in axis.texts]
    assert "replica 0: 12 micro-batches" in texts and "replica 1: 4 micro-batches" in texts
    assert texts.count("3") == 2 * 5 and texts.count("11") == 2 * 2
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


PAIRS = [(a, b) for a in range(4) for b in range(a)]
LINKS = [MeasuredLink(ranks=pair, protocol="gloo", latency_seconds=1e-3, bytes_per_second=1e9) for pair in PAIRS]
SNAIL = device("snail", points=[{"batch": 1, "seconds": 50.0}, {"batch": 4, "seconds": 200.0}])


def report_text(*given: Any, **options: Any) -> str:
    return printed(batch_report.render(compare(*given, **options)))


def test_the_communication_time_is_the_measured_one_or_follows_from_the_links() -> None:
    """All links are equal, so every ring takes as long as the measured one, also that of ADAPT."""
    report = compare(profile(links=LINKS), 400)
    (adapted,) = (each.allocation for each in report.results if each.name == "adapt")
    assert adapted is not None and report.chosen.communication_seconds == pytest.approx(0.5)
    assert adapted.communication_seconds == pytest.approx(report.chosen.communication_seconds)
    assert adapted.wall_seconds <= report.chosen.wall_seconds <= (1 + LEAST_GAIN) * adapted.wall_seconds
    report = compare(profile(links=LINKS, communication_seconds=0.0), 16)
    assert report.chosen.communication_seconds == pytest.approx(1e-3 + 2 * 0.75 * 2 * GIB / 1e9)


def test_what_is_printed() -> None:
    """Units fit the values, predicted ones are marked, and names with brackets are no markup."""
    text = report_text(profile(links=[]), 64)
    assert " [s] " in text and "predicted" not in text
    quick = device(points=[{"batch": 1, "seconds": 2e-4}, {"batch": 4, "seconds": 5e-4}], memory_bytes=2**20)
    text = report_text(profile(kinds=[quick], ranks=[0], links=[], communication_seconds=1e-5), 4)
    assert "[µs]" in text and "[MiB]" in text and "µs (2% of the wall time) in communication" in text
    text = report_text(profile(links=[], communication_seconds=50.0), 64, stage=3)
    assert "measured at stage 0" in text and "fast was measured up to a micro-batch of 4; above it" in text
    odd = device("[bold]odd[/x]", host="node[3]")
    assert "[bold]odd[/x] (node[3])" in report_text(profile(kinds=[odd], ranks=[0], links=[]), 4)


def test_the_remaining_ranks_hold_the_state_of_a_dropped_rank() -> None:
    # At stage 3, four ranks hold 4 GiB of the state each, three ranks 5.33 GiB. It is faster to drop the slow rank.
    options = {"ranks": [0, 0, 0, 1], "links": LINKS, "communication_seconds": 0.01}
    roomy, tight = (device(memory_bytes=size * GIB, max_batch=0) for size in (17, 7))
    report = compare(profile(kinds=[roomy, SNAIL], **options), 12, stage=3, method="adapt")
    *lines, dropped = device_lines(report.profile, report.chosen)
    assert not dropped.share.runs
    assert {line.used_bytes - line.share.micro_batch * 2 * GIB for line in lines} == {16 * GIB // 3 + 1}
    assert all(line.used_bytes <= line.device.memory_bytes for line in lines)
    # It is kept if the others cannot hold its part of the state.
    report = compare(profile(kinds=[tight, SNAIL], **options), 12, stage=3, method="adapt")
    assert report.adapt is not None and report.adapt.dropped == ()
    assert "the others could not hold a sample each" in printed(batch_report.render(report))


def at_80_columns(shown: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    console = ReportConsole()
    monkeypatch.setattr(console, "file", io.StringIO())
    console.width = 80
    console.print(shown)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_table_that_does_not_fit_is_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [word_column("name"), *(number_column(f"[{'unit' * 3}]") for _ in range(8))]
    lines = at_80_columns(make_table(columns, [["word", *["1"] * 8], None, ["other", *["2"] * 8]]), monkeypatch)
    assert lines[1].split() == ["name", *["[unitunitunit]"] * 8]
    assert [line.split() for line in lines[3:6:2]] == [["word", *["1"] * 8], ["other", *["2"] * 8]]
