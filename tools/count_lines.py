"""Lines and modules of Python beside their budgets: ``make lines``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent

BUDGETS = {
    "colossal_hetero": 43_000,
    "colossal_hetero/common": 750,
    "colossal_hetero/colossalai_support": 900,
    "colossal_hetero/layers": 3_800,
    "colossal_hetero/planner": 12_000,
    "colossal_hetero/balance": 4_300,
    "colossal_hetero/profiling": 3_700,
    "colossal_hetero/data_parallel": 2_700,
    "colossal_hetero/checkpoint": 4_000,
    "colossal_hetero/elastic": 2_300,
    "colossal_hetero/plugin": 6_000,
    "colossal_hetero/cli": 1_800,
    "colossal_hetero/testing": 300,
    "tests": 27_000,
    "examples": 3_000,
    "examples/common": 1_800,
    "benchmarks": 11_000,
}
"""Lines, with docstrings and blank ones."""


def lines_and_modules(folder: Path) -> tuple[int, int]:
    """Of all Python files in a folder; ``__init__.py`` is no module."""
    files = sorted(folder.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    return lines, sum(path.name != "__init__.py" for path in files)


def main() -> None:
    table = Table("room", box=None)
    for column in ("lines", "budget", "over", "modules"):
        table.add_column(column, justify="right")
    for folder, budget in BUDGETS.items():
        lines, modules = lines_and_modules(REPOSITORY / folder)
        over = f"{lines / budget - 1:.0%}" if lines > budget else ""
        table.add_row(folder, f"{lines:,}", f"{budget:,}", over, str(modules))
    Console().print(table)


if __name__ == "__main__":
    main()
