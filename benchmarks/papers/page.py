"""A figure or table of a paper beside our numbers: printed, drawn, and kept as a section of ``docs/papers.md``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURES = DOCS / "papers.md", DOCS / "papers"


@dataclass(frozen=True)
class Inputs:
    images: str
    """Folder of images, as train/CLASS/* and test/CLASS/*."""
    tables: Path
    """Folder of published times of GPUs, see :mod:`.gpu_tables`."""


@dataclass(frozen=True)
class Curves:
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """x and y by name."""


@dataclass(frozen=True)
class Figure:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    why: str
    """What differs from the paper, and why."""
    curves: Sequence[Curves] = field(default=())


def measured(module: str, name: str, *options: str) -> dict[str, Any]:
    """Numbers that a module of this folder writes, kept in ``runs/papers/NAME.json``."""
    out = Path("runs/papers", f"{name}.json")
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        if subprocess.run([sys.executable, "-m", module, "--out", str(out), *options], check=False).returncode:
            sys.exit(f"{module} has failed, as it says above")
    return json.loads(out.read_text())


def show(name: str, figure: Figure) -> None:
    """Print the figure, and replace its section of the page and its picture. ``name`` is that of the command."""
    table = _table(figure)
    Console(width=160, highlight=False).print(figure.title, table, figure.why, sep="\n")
    lines = [
        f"<!-- {name} -->",
        f"## {figure.title}",
        "",
        f"`python -m benchmarks.papers {name}`",
        "",
        _markdown(table),
    ]
    if figure.curves:
        picture = PICTURES / f"{name.replace(' ', '-')}.png"
        _draw(figure, picture)
        lines += ["", f"![{figure.title}](papers/{picture.name})"]
    lines += ["", figure.why, f"<!-- end of {name} -->"]
    section = "\n".join(lines)
    text = PAGE.read_text(encoding="utf-8")
    old = re.compile(rf"<!-- {name} -->.*?<!-- end of {name} -->", re.S)
    text = old.sub(lambda _: section, text) if old.search(text) else f"{text.rstrip()}\n\n{section}\n"
    PAGE.write_text(text, encoding="utf-8")


def _table(figure: Figure) -> Table:
    table = Table(box=MARKDOWN)
    for column in figure.columns:
        table.add_column(Text(column))  # in a plain string rich reads brackets as markup
    for row in figure.rows:
        table.add_row(*(Text(f"{cell:.2f}" if isinstance(cell, float) else str(cell)) for cell in row))
    return table


def _markdown(table: Table) -> str:
    console = Console(width=1000, record=True, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(table)
    return "\n".join(line.strip() for line in captured.get().strip().splitlines())


def _draw(figure: Figure, path: Path) -> None:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(5 * len(figure.curves), 3.5), layout="constrained")
    for axes, curves in zip(canvas.subplots(1, len(figure.curves), squeeze=False)[0], figure.curves, strict=True):
        for name, (x, y) in curves.lines.items():
            axes.plot(x, y, marker="o", markersize=3, label=name)
        axes.set(xlabel=curves.x_label, ylabel=curves.y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    path.parent.mkdir(exist_ok=True)
    canvas.savefig(path, dpi=110)
