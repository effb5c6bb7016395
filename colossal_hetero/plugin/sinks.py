"""Functions for a plugin's ``on_report=``, which send its numbers to a logger: ``on_report=tensorboard("runs")``.

A logger is imported, and its files are opened, at the first report, on rank 0 only. If it is not installed, the call in
the script raises ``ImportError``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..common.atomic_files import replacing
from .report import OnReport

Numbers = dict[str, float]
PREFIX = "colossal_hetero"


def tensorboard(folder: str | Path) -> OnReport:
    """Scalars for TensorBoard in ``folder``."""
    _check("tensorboard", "tensorboard")

    @cache
    def writer() -> Any:
        return import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(numbers: Numbers) -> None:
        for name, value in _named(numbers).items():
            writer().add_scalar(name, value, int(numbers["iteration"]))
        writer().flush()

    return write


def wandb(run: Any = None) -> OnReport:
    """Numbers for ``run``, or for the run that ``wandb.init`` has begun on rank 0."""
    _check("wandb", "wandb")

    def log(numbers: Numbers) -> None:
        # Without a step, which would have to agree with those of the script.
        (run or import_module("wandb")).log(_named(numbers) | {f"{PREFIX}/iteration": numbers["iteration"]})

    return log


def mlflow() -> OnReport:
    """Metrics of MLflow's active run."""
    _check("mlflow", "mlflow")

    def log(numbers: Numbers) -> None:
        import_module("mlflow").log_metrics(_named(numbers), step=int(numbers["iteration"]))

    return log


def prometheus(path: str | Path) -> OnReport:
    """The latest numbers in Prometheus' text format, for the textfile collector of its node exporter. The file, whose
    name must end in ``.prom``, is replaced as a whole.

    Raises:
        ValueError: another ending.
        FileNotFoundError: the folder of the file does not exist.
    """
    path = Path(path)
    if path.suffix != ".prom":
        raise ValueError(f"the textfile collector reads names that end in .prom, not {path.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} of {path.name} does not exist; create it first")

    def write(numbers: Numbers) -> None:
        by_metric: dict[str, list[str]] = {}
        for name, value in numbers.items():
            metric, labels = _metric(name)
            by_metric.setdefault(metric, []).append(f"{metric}{labels} {value!r}")
        lines = [line for metric, rows in by_metric.items() for line in (f"# TYPE {metric} gauge", *rows)]
        with replacing(path) as draft:
            draft.write_text("\n".join(lines) + "\n")

    return write


def _metric(name: str) -> tuple[str, str]:
    """Name and labels: ``balance/rank1/work_seconds`` becomes ``colossal_hetero_balance_work_seconds`` of rank 1."""
    parts, labels = [], []
    for part in name.split("/"):
        found = re.fullmatch(r"(rank|replica|stage)(\d+)", part)
        if found is None:
            parts.append(part)
        else:
            labels.append(f'{found[1]}="{found[2]}"')
    return "_".join((PREFIX, *parts)), f"{{{','.join(labels)}}}" if labels else ""


def _named(numbers: Numbers) -> Numbers:
    return {f"{PREFIX}/{name}": value for name, value in numbers.items() if name != "iteration"}


def _check(module: str, package: str) -> None:
    if find_spec(module) is None:
        raise ImportError(f"{package} is not installed, so it cannot get reports: pip install {package}")
