"""The report of an allocation: lines, comparison, picture; tables in narrow terminals."""

import io

import pytest
from rich.console import Console

from colossal_hetero.common.tables import ReportConsole, make_table, number_column, word_column
from colossal_hetero.planner.batches.allocation import LEAST_GAIN
from colossal_hetero.planner.cluster.topology import MeasuredLink
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.report import batch_report, plan_table
from colossal_hetero.planner.report.batch_report import compare, device_lines, render
from tests.support.batch_profiles import GIB, device, profile
from tests.support.plans import plan

PAIRS = [(a, b) for a in range(4) for b in range(a)]
LINKS = [MeasuredLink(ranks=pair, protocol="gloo", latency_seconds=1e-3, bytes_per_second=1e9) for pair in PAIRS]
SNAIL = device("snail", points=[{"batch": 1, "seconds": 50.0}, {"batch": 4, "seconds": 200.0}])


def printed(report: object, width: int = 140) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(render(report))
    return stream.getvalue()


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
    text = printed(compare(profile(links=[]), 64))
    assert " [s] " in text and "predicted" not in text
    quick = device(points=[{"batch": 1, "seconds": 2e-4}, {"batch": 4, "seconds": 5e-4}], memory_bytes=2**20)
    text = printed(compare(profile(kinds=[quick], ranks=[0], links=[], communication_seconds=1e-5), 4))
    assert "[µs]" in text and "[MiB]" in text and "µs (2% of the wall time) in communication" in text
    text = printed(compare(profile(links=[], communication_seconds=50.0), 64, stage=3))
    assert "measured at stage 0" in text and "fast was measured up to a micro-batch of 4; above it" in text
    odd = device("[bold]odd[/x]", host="node[3]")
    assert "[bold]odd[/x] (node[3])" in printed(compare(profile(kinds=[odd], ranks=[0], links=[]), 4))


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
    assert "the others could not hold a sample each" in printed(report)


def at_80_columns(shown: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    console = ReportConsole()
    monkeypatch.setattr(console, "file", io.StringIO())
    console.width = 80
    console.print(shown)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_tables_of_plans_and_batches_fit_with_all_columns_and_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = at_80_columns(plan_table.render([RankedPlan(plan(iteration_seconds=1.23), "the best")]), monkeypatch)
    assert max(map(len, lines)) <= 80
    assert {"replica", "device", "ranks", "[GiB]", "bubble", "A100-40", "V100-16"} <= set(" ".join(lines).split())
    kinds = [device(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB")]
    batches = batch_report.compare(profile(kinds=kinds, links=[]), 1024)
    lines = at_80_columns(batch_report.render(batches), monkeypatch)
    assert max(map(len, lines)) <= 80
    assert {"ranks", "steps", "samples", "busy", "[GiB]", "A100-SXM4-80GB"} <= set(" ".join(lines).split())


def test_a_table_that_does_not_fit_is_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [word_column("name"), *(number_column(f"[{'unit' * 3}]") for _ in range(8))]
    lines = at_80_columns(make_table(columns, [["word", *["1"] * 8], None, ["other", *["2"] * 8]]), monkeypatch)
    assert lines[1].split() == ["name", *["[unitunitunit]"] * 8]
    assert [line.split() for line in lines[3:6:2]] == [["word", *["1"] * 8], ["other", *["2"] * 8]]
