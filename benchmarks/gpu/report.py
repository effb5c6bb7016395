"""The page with all results, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .part import Part
from .store import CaseResult, PartResults

__all__ = ["results_page"]

HEAD = """# Results on a GPU

`make gpu` measures this and writes this page ([how](README.md)). Where there is no figure, the page says why.
"""

WORDS = {"failed": "**failed**", "does not fit": "does not fit", "started": "**did not end**"}


def results_page(
    parts: Sequence[Part],
    results: Mapping[str, PartResults],
    cases: Mapping[str, Sequence[str]],
    failures: Mapping[str, str] | None = None,
) -> str:
    """The page.

    Args:
        parts: all parts of the suite, in order.
        results: what is known, by part.
        cases: names of all cases, by part.
        failures: what stopped a part as a whole, by part.
    """
    failed = failures or {}
    sections = (_section(part, results.get(part.name), cases[part.name], failed.get(part.name, "")) for part in parts)
    return "\n".join([HEAD, *sections])


def _section(part: Part, results: PartResults | None, cases: Sequence[str], failure: str) -> str:
    lines = [f"## {part.name}", "", *([part.about.strip(), ""] if part.about else [])]
    if failure:
        lines += [f"**Failed**: {failure}.", ""]
    if results is None and not cases:
        return "\n".join(lines)
    if results is None:
        return "\n".join([*lines, f"Not run yet: {len(cases)} cases.", ""])
    known = {name: results.cases[name] for name in cases if name in results.cases}
    dates = sorted({result.date for result in known.values()})
    facts = ", ".join(f"{name} {value}" if name != "device" else value for name, value in results.environment.items())
    lines += [f"{facts}; {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}." if dates else f"{facts}.", ""]
    lines += [_line(part.columns), _line(["---"] * len(part.columns))]
    for name in cases:
        lines += _rows(name, known.get(name), len(part.columns))
    return "\n".join([*lines, ""])


def _rows(name: str, result: CaseResult | None, width: int) -> list[str]:
    if result is not None and result.status == "done":
        return [_line([name, *map(_cell, row)]) for row in result.rows]
    words = "not run yet" if result is None else ": ".join(filter(None, [WORDS[result.status], result.message]))
    return [_line([name, words, *[""] * (width - 2)])]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
