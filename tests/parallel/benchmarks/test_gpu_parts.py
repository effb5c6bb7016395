"""Every part of the GPU suite runs on a CPU with tiny sizes. Cases that need no GPU give rows, with right results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.part import Machine
from benchmarks.gpu.store import load_results
from benchmarks.gpu.suite import PARTS, load_part
from benchmarks.gpu.worker import measure_part


@pytest.mark.parametrize("name", PARTS)
def test_a_part_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    part, machine = load_part(name), Machine(torch.device("cpu"), gpus=0, is_tiny=True)
    assert part.name == name
    assert measure_part(part, machine, tmp_path / "part.json", 300.0, again=False, only=[])
    results = load_results(tmp_path / "part.json")
    assert results is not None
    for case in part.cases(machine):
        result = results.cases[case.name]
        assert result.status == ("does not fit" if case.gpus else "done"), f"{case.name}: {result.message}"
        assert all(len(row) == len(part.columns) - 1 and "**no**" not in row for row in result.rows), result.rows
        assert result.rows or case.gpus
