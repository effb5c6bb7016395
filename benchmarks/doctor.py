"""How often the doctor is right: runs with one fault and without any, and what watching costs.

    python -m benchmarks.doctor [--repeats 3] [--healthy 20]

60 runs with a fault (a CPU quota, a slow loader, a slow link, more work), on each of two ranks, under DDP, FSDP and
Colossal-AI; 20 runs without a fault; and for what watching costs, a run of each in which it is switched on and off in
turn. Takes about 50 minutes. Slow links need root and ``ip``; quotas need writable control groups.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.common import print_table, read_options
from benchmarks.doctor_script import WAYS
from benchmarks.pipeline.namespaces import missing, nodes

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "benchmarks" / "doctor_script.py"
CAUSES = {"quota": "compute", "compute": "compute", "loader": "loader", "link": "network", "none": "nothing"}
LINK_MEGABITS = 100.0
ITERATIONS = {"link": 80, "none": 600}
STRETCH, STRETCHES = 20, 121
AFTER_SECONDS = 12.0
"""The links are measured after half of it, so runs take longer than that."""


class Run(NamedTuple):
    way: str
    fault: str
    slow: int


def runs(repeats: int, healthy: int) -> list[Run]:
    """All runs: each fault but additional work ``repeats`` times, additional work once, none ``healthy`` times."""
    faults = ["quota", "loader", "link"] * repeats + ["compute"] * bool(repeats)
    faulty = [Run(way, fault, slow) for fault in faults for way in WAYS for slow in (0, 1)]
    return faulty + [Run(WAYS[number % len(WAYS)], "none", 0) for number in range(healthy)]


def train(run: Run, folder: Path) -> list[dict[str, Any]]:
    """Run the script on two ranks, watched. Returns the findings of the last report."""
    found = folder / "found.json"
    found.unlink(missing_ok=True)
    fault = "none" if run.fault == "link" else run.fault
    command = ["-m", "colossal_hetero.doctor", "--after", str(AFTER_SECONDS), "--json", str(found)]
    command += [str(SCRIPT), "--way", run.way, "--fault", fault, "--slow", str(run.slow), "--out", str(folder)]
    command += ["--iterations", str(ITERATIONS.get(run.fault, 250))]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "MASTER_PORT": "29555"}
    with ExitStack() as stack:
        if run.fault == "link":
            places = stack.enter_context(nodes([2], LINK_MEGABITS, LINK_MEGABITS))
            variables |= {"MASTER_ADDR": places[0].ethernet, "GLOO_SOCKET_IFNAME": "eth0", "WORLD_SIZE": "2"}
            starts = [
                (["ip", "netns", "exec", place.namespace, sys.executable, *command], {"RANK": str(rank)})
                for rank, place in enumerate(places)
            ]
        else:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            starts = [([*launcher, *command], {})]
        started = [
            subprocess.Popen(line, env=variables | own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for line, own in starts
        ]
        errors = ""
        try:
            for process in started:
                error = process.communicate(timeout=600)[1]
                errors += error
                if process.returncode:
                    raise RuntimeError(f"{run} failed:\n{error}")
        finally:
            for process in started:
                process.terminate()
    if not found.exists():
        print(f"{run} has no report:\n{errors}")
        return [{"cause": "no report", "ranks": []}]
    return json.loads(found.read_text())["findings"]


def said(findings: Sequence[dict[str, Any]]) -> tuple[str, list[int]]:
    """The cause and the ranks of the most expensive finding."""
    return (findings[0]["cause"], findings[0]["ranks"]) if findings else ("nothing", [])


def is_right(run: Run, findings: Sequence[dict[str, Any]]) -> bool:
    """A link between two ranks has no rank that is slow, so there only the cause counts."""
    cause, ranks = said(findings)
    return cause == CAUSES[run.fault] and (run.fault in ("link", "none") or ranks == [run.slow])


def overhead(way: str, folder: Path) -> float:
    """CPU time of a stretch of watched iterations over that of the plain ones around it; the median of many. Wall time
    of stretches varies by several percent, which is more than what is looked for."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    options = [
        "--way",
        way,
        "--alternate",
        str(STRETCH),
        "--iterations",
        str(STRETCHES * STRETCH),
        "--out",
        str(folder),
    ]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([*launcher, *options], env=variables, check=True, capture_output=True)
    ratios = []
    for rank in (0, 1):
        ends = json.loads((folder / f"{rank}.json").read_text())["cpu"][STRETCH - 1 :: STRETCH]
        seconds = [after - before for before, after in pairwise(ends)]  # watched, plain, watched, …
        ratios += [2 * seconds[at] / (seconds[at - 1] + seconds[at + 1]) for at in range(2, len(seconds) - 1, 2)]
    return median(ratios)


def main() -> None:
    options = read_options(__doc__, repeats=3, healthy=20, no_overhead=False)
    right: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        for run in runs(options.repeats, options.healthy):
            if run.fault == "link" and missing():
                continue
            findings = train(run, Path(name))
            total[run.fault, run.way] += 1
            right[run.fault, run.way] += is_right(run, findings)
            verdict = "right" if is_right(run, findings) else "WRONG"
            print(f"{run.way}, {run.fault}, rank {run.slow}: {said(findings)}: {verdict}", flush=True)
        ratios = [overhead(way, Path(name)) for way in WAYS if not options.no_overhead]

    rows = [[fault, *(f"{right[fault, way]} of {total[fault, way]}" for way in WAYS)] for fault in CAUSES]
    if ratios:
        rows.append(["watched / plain", *(f"{ratio:.4f}" for ratio in ratios)])
    print_table("Runs whose most expensive finding is the fault", ["fault", *WAYS], rows)


if __name__ == "__main__":
    main()
