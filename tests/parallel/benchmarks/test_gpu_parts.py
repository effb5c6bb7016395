"""The first case that needs no GPU of each part of the GPU suite is right on a CPU, with tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.part import Machine
from benchmarks.gpu.store import load_results
from benchmarks.gpu.suite import PARTS, load_part
from benchmarks.gpu.worker import measure_part
from tests.support.random_examples import IS_THOROUGH


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    part, machine = load_part(name), Machine(torch.device("cpu"), gpus=0, is_tiny=True)
    assert part.name == name
    cases = part.cases(machine)
    if not IS_THOROUGH:
        cases = [case for case in cases if not case.gpus][:1] or cases
    names = [case.name for case in cases]
    assert measure_part(part, machine, tmp_path / "part.json", 300.0, again=False, only=names)
    results = load_results(tmp_path / "part.json")
    assert results is not None
    for case in cases:
        result = results.cases[case.name]
        assert result.status == ("does not fit" if case.gpus else "done"), f"{case.name}: {result.message}"
        assert all(len(row) == len(part.columns) - 1 and "**no**" not in row for row in result.rows), result.rows
        assert result.rows or case.gpus
