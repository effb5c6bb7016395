"""Show on a real GPU that everything that was written for one runs on one, and how fast.

python -m benchmarks.gpu [PART ...]

Runs the parts one after the other, each in a process of its own for at most eight minutes, and writes RESULTS.md. A
part that was stopped goes on where it was when the command is run again. Without a GPU, ``--tiny`` shows that the suite
itself works: it runs every part on the CPU with tiny sizes, and writes nothing into the repository.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .part import Machine, Part
from .store import CaseResult, PartResults, load_results
from .suite import PARTS, load_part
from .worker import measure_part

FOLDER = Path(__file__).parent

GRACE_SECONDS = 30
"""How long after the time limit a part is stopped in the middle of a case."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--case", action="append", default=[], metavar="TEXT", help="only cases with TEXT in the name")
    parser.add_argument("--again", action="store_true", help="measure also what has a result")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit for each part (default 8)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, also on a CPU: shows that the suite works")
    parser.add_argument("--out", type=Path, help="folder of RESULTS.md and results/ (default: benchmarks/gpu)")
    parser.add_argument("--list", action="store_true", help="list the cases, and what is known of them")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} must be positive")
    return options


def this_machine(is_tiny: bool) -> Machine:
    gpus = torch.cuda.device_count()
    return Machine(torch.device("cuda", 0) if gpus else torch.device("cpu"), gpus, is_tiny)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    machine = this_machine(options.tiny)
    names = options.parts or list(PARTS)
    if options.list:
        _list_cases(names, machine, options.out or FOLDER)
        return 0
    if machine.gpus == 0 and not options.tiny:
        print("There is no GPU here. To see that the suite works: python -m benchmarks.gpu --tiny", file=sys.stderr)
        return 2
    out = options.out or (Path(tempfile.mkdtemp(prefix="gpu-suite-")) if options.tiny else FOLDER)
    if options.worker:
        (name,) = names
        path = _results_file(out, name)
        part = load_part(name)
        is_complete = measure_part(part, machine, path, options.minutes * 60, again=options.again, only=options.case)
        return 0 if is_complete else 3
    failures: dict[str, str] = {}
    for name in names:
        if failure := _run_part(name, options, out):
            failures[name] = failure
        failures = write_page(machine, out, failures)
    print(f"wrote {out / 'RESULTS.md'}", file=sys.stderr)
    return 1 if failures or _problems(names, out) else 0


def _run_part(name: str, options: argparse.Namespace, out: Path) -> str:
    """Measure a part in a process of its own, so that whatever happens there does not stop the others.

    Returns how that process failed; "" if it did not, or if the time was over.
    """
    command = [sys.executable, "-m", "benchmarks.gpu", "--worker", name, "--out", str(out)]
    command += ["--minutes", str(options.minutes), *(f"--case={text}" for text in options.case)]
    command += ["--again"] * options.again + ["--tiny"] * options.tiny
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(options.minutes * 60 + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status is None:
        print(f"{name}: stopped after {options.minutes:g} minutes in the middle of a case", file=sys.stderr)
    elif status == 3:
        print(f"{name}: the time was over; run the command again for the other cases", file=sys.stderr)
    elif status != 0:
        failure = f"its process ended with status {status}"
        print(f"{name}: {failure}", file=sys.stderr)
        return failure
    return ""


def write_page(machine: Machine, out: Path, failures: Mapping[str, str]) -> dict[str, str]:
    """Write RESULTS.md; the ``failures`` of whole parts, and of those that cannot be loaded."""
    parts, found = [], dict(failures)
    for name in PARTS:
        try:
            parts.append(load_part(name))
        except Exception as error:
            found[name] = f"it cannot be loaded: {type(error).__name__}: {error}"
            parts.append(Part(name, "", ("case", "result"), lambda machine: []))
    known = {part.name: load_results(_results_file(out, part.name)) for part in parts}
    page = results_page(
        parts,
        {name: results for name, results in known.items() if results is not None},
        {part.name: [case.name for case in part.cases(machine)] for part in parts},
        found,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "RESULTS.md").write_text(page, encoding="utf-8")
    return found


def _list_cases(names: list[str], machine: Machine, out: Path) -> None:
    for name in names:
        results = load_results(_results_file(out, name))
        for case in load_part(name).cases(machine):
            result = None if results is None else results.cases.get(case.name)
            print(f"{name}: {case.name}: {'not run yet' if result is None else result.status}")


def _problems(names: list[str], out: Path) -> list[str]:
    found = {name: load_results(_results_file(out, name)) for name in names}
    return [
        f"{name}: {case}"
        for name, results in found.items()
        for case, result in (results.cases.items() if results is not None else ())
        if result.status in ("failed", "started")
    ]


def _results_file(out: Path, name: str) -> Path:
    return out / "results" / f"{name}.json"


# The page with all results --------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    sys.exit(main())
