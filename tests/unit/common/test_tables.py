"""Tables in narrow terminals."""

from __future__ import annotations

import io

import pytest

from colossal_hetero.common.tables import ReportConsole, make_table, number_column, word_column
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.report import batch_report, plan_table
from tests.support.batch_profiles import device, profile
from tests.support.plans import plan


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
