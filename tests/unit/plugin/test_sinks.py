"""Sinks of reports: what reaches each logger."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from colossal_hetero.plugin import sinks

NUMBERS = {
    "iteration": 100.0,
    "balance/saved_seconds": 0.25,
    "balance/rank1/work_seconds": 1e-3,
    "batches/rank0/samples": 8.0,
}
NAMED = {f"colossal_hetero/{name}": value for name, value in NUMBERS.items() if name != "iteration"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Loggers that keep what they get."""
    got: dict[str, Any] = {}
    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    wandb.log = lambda numbers: got.update(wandb=numbers)  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda numbers, step: got.update(mlflow=(numbers, step))  # type: ignore[attr-defined]
    for module in (wandb, mlflow):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sinks, "find_spec", lambda name: object())
    return got


def test_wandb_gets_numbers_without_a_step(installed: dict[str, Any]) -> None:
    sinks.wandb()(NUMBERS)
    assert installed["wandb"] == NAMED | {"colossal_hetero/iteration": 100.0}


def test_mlflow_gets_numbers_and_the_step(installed: dict[str, Any]) -> None:
    sinks.mlflow()(NUMBERS)
    assert installed["mlflow"] == (NAMED, 100)


def test_prometheus_reads_one_line_for_each_number(tmp_path: Path) -> None:
    path = tmp_path / "training.prom"
    sinks.prometheus(path)(NUMBERS)
    assert path.read_text().splitlines() == [
        *("# TYPE colossal_hetero_iteration gauge", "colossal_hetero_iteration 100.0"),
        *("# TYPE colossal_hetero_balance_saved_seconds gauge", "colossal_hetero_balance_saved_seconds 0.25"),
        "# TYPE colossal_hetero_balance_work_seconds gauge",
        'colossal_hetero_balance_work_seconds{rank="1"} 0.001',
        "# TYPE colossal_hetero_batches_samples gauge",
        'colossal_hetero_batches_samples{rank="0"} 8.0',
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["training.prom"]


def test_tensorboard_files_are_written_at_the_first_report(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write = sinks.tensorboard(tmp_path / "runs")
    assert not list(tmp_path.iterdir())
    write(NUMBERS)
    found = EventAccumulator(str(tmp_path / "runs")).Reload()
    assert sorted(found.Tags()["scalars"]) == sorted(NAMED)
    (saved,) = found.Scalars("colossal_hetero/balance/saved_seconds")
    assert (saved.step, saved.value) == (100, 0.25)


def test_impossible_sinks_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    for make, name in (
        (sinks.wandb, "wandb"),
        (sinks.mlflow, "mlflow"),
        (lambda: sinks.tensorboard("x"), "tensorboard"),
    ):
        with pytest.raises(ImportError, match=f"{name} is not installed.*pip install {name}"):
            make()
    with pytest.raises(ValueError, match=r"end in \.prom, not training\.txt"):
        sinks.prometheus(tmp_path / "training.txt")
    with pytest.raises(FileNotFoundError, match="create it first"):
        sinks.prometheus(tmp_path / "nowhere" / "training.prom")
