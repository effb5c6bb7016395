"""Plans of peers' planners, made by running them on our eleven clusters, as one TOML file for each peer.

Drives a checkout of Sailor's repository (``--sailor``), which has Sailor's planner and its authors' ports of other
planners. They run with their own Python (``--python``), each in a process of its own with a time limit; see
``inputs.py`` for the inputs that they get. Planners of equal devices plan for each kind of GPU alone, and
the plan that they expect to be the fastest is taken.

The plan of a peer is the first one in its own order that fits in memory by Sailor's count and by ours and that a layout
line can say. If there is none, the file says why. ``compare.py --plans`` reads the files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.planner.peers.inputs import prepare_copy
from benchmarks.planner.peers.layouts import SEVERAL_DEGREES, has_one_degree, layout_line
from benchmarks.planner.published_clusters import (
    CLUSTERS,
    DATA,
    MICRO_BATCHES,
    Case,
    Cluster,
    cluster_name,
    published_cases,
    read_published,
)
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cost.evaluate import evaluate_layout
from colossal_hetero.planner.cost.layout_line import read_layout

PEERS = ("Sailor", "AMP", "Metis", "FlashFlex", "DTFM")
EQUAL_PEERS = ("Atlas", "Varuna", "Piper", "Galvatron")
"""They plan for one kind of GPU."""
CHILD = Path(__file__).parent / "child.py"
MOST_PLANS = 300
"""Of one run, in the planner's order, that are looked at."""


@dataclass
class Found:
    """What a run of a planner gave."""

    layout: str | None
    note: str
    own_seconds: float = float("inf")
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)


def run_peer(peer: str, cluster: Cluster, case: Case, copy: Path, arguments: argparse.Namespace) -> Found:
    """Runs one planner on one cluster and takes its first plan that can be used."""
    with tempfile.TemporaryDirectory() as scratch:
        job, answer = Path(scratch) / "job.json", Path(scratch) / "answer.json"
        content = {
            "peer": peer,
            "home": str(copy.parent.resolve()),
            "scratch": scratch,
            "model": case.profile.name,
            "cluster": cluster,
            "memory_bytes": {kind: GPUS[kind].memory_bytes for kind, _, _ in cluster},
            "global_batch": arguments.global_batch,
            "seconds": arguments.seconds,
            "most_plans": MOST_PLANS,
        }
        job.write_text(json.dumps(content), encoding="utf-8")
        start = time.monotonic()
        command = [str(arguments.python), str(CHILD), str(job), str(answer)]
        try:
            # A planner may stop its search itself at the limit and then still has to write its plans.
            done = subprocess.run(command, capture_output=True, text=True, timeout=1.5 * arguments.seconds, cwd=scratch)
        except subprocess.TimeoutExpired:
            return Found(None, f"no answer in {1.5 * arguments.seconds:g} s", seconds=1.5 * arguments.seconds)
        seconds = time.monotonic() - start
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1].replace(f"{content['home']}/", "")
            return Found(None, f"ended with {done.returncode}: {last[:160]}", seconds=seconds)
        found = choose(json.loads(answer.read_text(encoding="utf-8")), case, arguments.global_batch)
        found.seconds = seconds
        return found


def choose(answer: dict[str, Any], case: Case, global_batch: int) -> Found:
    """The first plan that can be said as a line and fits by our count, too, or has several degrees, which we do not
    count."""
    profile, reasons = case.profile, Counter[str]()
    if answer["too_large"]:
        reasons["too large by Sailor's count"] = answer["too_large"]
    for plan in answer["plans"]:
        try:
            line = layout_line(plan, profile.layers, profile.before, profile.after, global_batch)
            if not has_one_degree(line):
                note = f"{answer['returned']} plans returned; {SEVERAL_DEGREES}"
                return Found(line, _note(note, reasons), float(plan.get("own_seconds", "inf")), reasons=reasons)
            evaluated = evaluate_layout(case.topology, profile, read_layout(line), global_batch=global_batch)
        except ValueError as error:
            reasons[str(error).splitlines()[0]] += 1
            continue
        if evaluated.fits:
            note = f"{answer['returned']} plans returned"
            return Found(line, _note(note, reasons), float(plan.get("own_seconds", "inf")), reasons=reasons)
        reasons["too large by our count"] += 1
    return Found(None, _note(f"none of {answer['returned']} plans can be used", reasons), reasons=reasons)


def _note(text: str, reasons: Counter[str]) -> str:
    if not reasons:
        return text
    return f"{text}; left out: {'; '.join(f'{number} × {reason}' for reason, number in reasons.most_common(4))}"


def run_equal(peer: str, cluster: Cluster, case: Case, copy: Path, arguments: argparse.Namespace) -> Found:
    """For a planner of equal devices: the best of its plans for each kind alone, by its own expectation."""
    runs = {kind: run_peer(peer, (part,), case, copy, arguments) for part in cluster for kind in part[:1]}
    kind, best = min(runs.items(), key=lambda each: (each[1].layout is None, each[1].own_seconds))
    notes = "; ".join(f"on {name}: {each.note}" for name, each in runs.items())
    chosen = f"its plan for {kind} alone; " if best.layout and len(runs) > 1 else ""
    return Found(best.layout, chosen + notes, best.own_seconds, sum(each.seconds for each in runs.values()))


def power_of_two(cluster: Cluster) -> list[Cluster]:
    """The cluster, or what is left of it with the most nodes if the number of its GPUs must be a power of two."""
    total = sum(count * size for _, count, size in cluster)
    goal = 1 << (total.bit_length() - 1)
    found: list[Cluster] = []
    for counts in itertools.product(*(range(count + 1) for _, count, _ in cluster)):
        parts = [(kind, used, size) for used, (kind, _, size) in zip(counts, cluster, strict=True) if used]
        if sum(used * size for _, used, size in parts) == goal:
            found.append(tuple(parts))
    return found


def run_metis(peer: str, cluster: Cluster, case: Case, copy: Path, arguments: argparse.Namespace) -> Found:
    """The port makes no plan if the number of GPUs is not a power of two: nodes are left out then, in each way."""
    runs = {cluster_name(part): run_peer(peer, part, case, copy, arguments) for part in power_of_two(cluster)}
    if len(runs) == 1:
        return next(iter(runs.values()))
    name, best = min(runs.items(), key=lambda each: (each[1].layout is None, each[1].own_seconds))
    notes = "; ".join(f"on {part}: {each.note}" for part, each in runs.items())
    chosen = f"its plan for {name}; " if best.layout else ""
    return Found(best.layout, chosen + notes, best.own_seconds, sum(each.seconds for each in runs.values()))


def written(peer: str, results: Sequence[tuple[Case, Found]], commit: str, arguments: argparse.Namespace) -> str:
    """The TOML file of one peer."""
    options = f"--sailor DIRECTORY --seconds {arguments.seconds:g} --peers {peer}"
    command = f"python -m benchmarks.planner.peers.run_planners {options}"
    lines = [
        f'peer = "{peer}"',
        'repository = "eth-easl/sailor"',
        f'commit = "{commit}"',
        f'date = "{datetime.now(timezone.utc):%Y-%m-%d}"',
        f'command = "{command}"',
        f"global_batch = {arguments.global_batch}",
    ]
    for case, found in results:
        lines += ["", "[[plans]]" if found.layout else "[[missing]]"]
        lines += [f"cluster = {_quoted(case.cluster)}", f"model = {_quoted(case.profile.name)}"]
        if found.layout:
            lines.append(f"layout = {_quoted(found.layout)}")
            if found.own_seconds < float("inf"):
                lines.append(f"own_prediction_seconds = {found.own_seconds:.4g}")
        lines += [f"planning_seconds = {found.seconds:.1f}", f"note = {_quoted(found.note)}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument("--sailor", type=Path, required=True, help="checkout of Sailor's repository")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="Python with what the peers need")
    parser.add_argument("--work", type=Path, help="folder for the copy of the checkout that is run; kept afterwards")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "plans", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=300, help="limit of one run (default: %(default)s)")
    parser.add_argument("--peers", nargs="+", default=[*PEERS, *EQUAL_PEERS], choices=[*PEERS, *EQUAL_PEERS])
    parser.add_argument("--global-batch", type=int, default=256, help="sequences per iteration (default: %(default)s)")
    parser.add_argument("--clusters", type=int, default=len(CLUSTERS), help="the first so many clusters only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        published = read_published(arguments.data)
        work = arguments.work or Path(folder)
        copy = prepare_copy(arguments.sailor, work, published.profiles, published.channels, MICRO_BATCHES)
        head = ["git", "-C", str(arguments.sailor), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
        cases = published_cases(arguments.data, CLUSTERS[: arguments.clusters])
        by_name = {cluster_name(cluster): cluster for cluster in CLUSTERS}
        arguments.out.mkdir(parents=True, exist_ok=True)
        for peer in arguments.peers:
            run = run_equal if peer in EQUAL_PEERS else run_metis if peer == "Metis" else run_peer
            results = []
            for case in cases:
                found = run(peer, by_name[case.cluster], case, copy, arguments)
                results.append((case, found))
                said = f"{found.seconds:.0f} s: {found.layout} ({found.note})"
                print(f"{peer}, {case.cluster}, {case.profile.name}: {said}", flush=True)
                path = arguments.out / f"{peer.lower()}.toml"
                path.write_text(written(peer, results, commit, arguments), encoding="utf-8")


if __name__ == "__main__":
    main()
