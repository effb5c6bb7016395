"""The GPU suite: what is measured again, what a failure leaves behind, the page, parity and waits of the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.layers.parity import Distances
from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.report import results_page
from benchmarks.gpu.store import CaseResult, PartResults, load_results
from benchmarks.gpu.worker import measure_part

MACHINE = Machine(torch.device("cpu"), gpus=0, is_tiny=True)


class Counted:
    """Measures one number, and counts how often."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error, self.calls = error, 0

    def __call__(self) -> Sequence[Row]:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return [(1.0,)]


def part(**measures: Counted) -> Part:
    return Part("p", "About.", ("case", "s"), lambda machine: [Case(name, each) for name, each in measures.items()])


def measure(of: Part, path: Path) -> bool:
    return measure_part(of, MACHINE, path, 60.0, again=False, only=())


def test_a_case_that_ended_the_process_is_not_tried_again_and_those_of_other_machines_are(tmp_path: Path) -> None:
    path, other, case = tmp_path / "p.json", tmp_path / "other.json", Counted()
    killed = Counted(error=KeyboardInterrupt())  # no Exception: as if the process were killed
    with pytest.raises(KeyboardInterrupt):
        measure(part(a=killed, b=Counted()), path)
    assert measure(part(a=killed, b=Counted()), path)
    results = load_results(path)
    assert results is not None and killed.calls == 1
    assert [results.cases[name].status for name in "ab"] == ["started", "done"]
    PartResults(environment={"device": "another"}).finish("a", CaseResult(status="done", rows=[[9.0]]), other)
    assert measure(part(a=case), other)
    results = load_results(other)
    assert results is not None and results.cases["a"].rows == [[1.0]]


def test_the_page_shows_every_case() -> None:
    cases = {
        "a": CaseResult(status="done", rows=[[1.23456, "x|y"], [2, ""]], date="2026-01-02"),
        "b": CaseResult(status="failed", message="ValueError: no", date="2026-01-01"),
    }
    about = Part("p", "What is measured.", ("case", "s", "note"), lambda machine: [])
    known = PartResults(environment={"device": "1 × H100", "torch": "2.11"}, cases=cases)
    page = results_page([about], {"p": known}, {"p": ["a", "b", "c"]})
    for line in (
        *("What is measured.", "1 × H100, torch 2.11; 2026-01-01 to 2026-01-02."),
        *("| case | s | note |", "| a | 1.235 | x\\|y |", "| a | 2 |  |"),
        *("| b | **failed**: ValueError: no |  |", "| c | not run yet |  |"),
    ):
        assert line in page.splitlines()
    assert "Not run yet: 3 cases." in results_page([about], {}, {"p": ["a", "b", "c"]})


EXACT = {"y": torch.tensor([1.0, -4.0], dtype=torch.float64), "dx": torch.tensor([2.0, 1.0], dtype=torch.float64)}
OFF = {"y": torch.tensor([1.0, -3.9]), "dx": torch.tensor([2.0, 1.5])}
OF_DENSE = {"y": 0.01, "dx": 0.5}


def test_half_precision_is_compared_with_the_dense_layer() -> None:
    single, half = Distances.in_precision(torch.float32), Distances.in_precision(torch.bfloat16)
    for found in (single, half):
        found.add("idle", "layer", OFF, EXACT, OF_DENSE)
    assert single.worst["idle"] == (pytest.approx(0.25), "layer, dx")
    assert half.worst["idle"] == (pytest.approx(10 / 17**0.5), "layer, y")
    # A result that is not a number is the worst.
    found, other = Distances(is_ratio=False), Distances(is_ratio=False)
    found.add("idle", "broken", {"y": torch.tensor([math.nan, 1.0])}, {"y": EXACT["y"]}, OF_DENSE)
    other.add("idle", "layer", OFF, EXACT, OF_DENSE)
    found.merge(other)
    other.merge(found)
    assert {each.worst["idle"][1] for each in (found, other)} == {"broken, y"}
