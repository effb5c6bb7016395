"""Iteration time and accuracy of every balance mode with the same straggler, in complete runs of the ViT example.

python -m benchmarks.tensor_parallel.modes --data-dir DIR [--epochs 2] [--seeds 3]

DIR holds images as train/CLASS/* and test/CLASS/*. Two ranks; rank 1 does every product eight times. The
control is the same training without a straggler. ``off`` with the straggler computes the same as the control, so it is
only timed, for a few iterations. Finished runs are kept in runs/modes.json and not repeated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.progress import Progress

from benchmarks.common import print_table, read_options
from colossal_hetero.common.files import write_json

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vit" / "train.py"
MODEL = ["--hidden", "128", "--depth", "6", "--heads", "4", "--patch", "8", "--batch-size", "64", "--lr", "1e-3"]
TIMED_ITERATIONS = 60
SLOWDOWN = 8
KEPT = Path("runs/modes.json")

VARIANTS: dict[str, tuple[str, ...]] = {
    "off, no straggler": ("--balance", "off"),
    "off": ("--balance", "off"),
    "resize": ("--balance", "resize"),
    "zero-pridiff-r": ("--paper", "zero-pridiff-r"),
    "semi": ("--balance", "semi"),
    "semi of the paper": ("--paper", "semi"),
    "auto": ("--balance", "auto"),
}
"""The example's arguments for each variant."""


def arguments_of(variant: str, options: Any, seed: int) -> list[str]:
    """The example's arguments for a run."""
    line = [*VARIANTS[variant], *MODEL, "--data", "folder", "--data-dir", options.data_dir, "--seed", str(seed)]
    line += ["--epochs", str(options.epochs)]
    if variant != "off, no straggler":
        line += ["--straggler", f"1:{SLOWDOWN}"]
    if variant == "off":
        line += ["--steps", str(TIMED_ITERATIONS)]
    return line


def train(arguments: Sequence[str]) -> dict:
    """The summary of a run of the example on two ranks with one thread each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        summary = Path(directory) / "summary.json"
        command = [sys.executable, str(EXAMPLE), *arguments, "--summary", str(summary)]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads(summary.read_text())


def tabulate(results: dict[str, dict], options: Any) -> None:
    """Accuracy as mean and standard deviation over the seeds, times as medians over them."""
    rows = []
    control: list[float] = []
    base = float("nan")
    for variant in VARIANTS:
        runs = [results[key] for seed in range(options.seeds) if (key := _key(variant, options, seed)) in results]
        if not runs:
            continue
        seconds = median(run["iteration_seconds"]["median"] for run in runs)
        accuracy = [100.0 * run["accuracy"][-1] for run in runs]
        if variant == "off, no straggler":
            control, base = accuracy, seconds
        shares = [mean(run["ranks"][1][name] for run in runs) for name in ("resized", "migrated")]
        measured = variant != "off"
        spread = stdev(accuracy) if len(accuracy) > 1 else float("nan")
        rows.append(
            (
                variant,
                f"{1e3 * seconds:.0f}",
                f"{seconds / base:.2f}",
                *(f"{share:.0%}" for share in shares),
                f"{mean(accuracy):.1f} ± {spread:.1f}" if measured else "as the control",
                f"{mean(control) - mean(accuracy):.1f}" if measured else "",
                len(runs),
            )
        )
    columns = ("mode", "iteration [ms]", "ratio", "resized", "migrated", "accuracy [%]", "loss", "seeds")
    title = f"Slowdown {SLOWDOWN} on rank 1 of 2 (products repeated), {options.epochs} epochs"
    print_table(title, columns, rows)


def _key(variant: str, options: Any, seed: int) -> str:
    return f"{variant}, slowdown {SLOWDOWN}, {options.epochs} epochs, seed {seed}"


def main() -> None:
    options = read_options(__doc__, data_dir="data/cifar10", epochs=2, seeds=3)
    results = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    runs = [(variant, seed) for seed in range(options.seeds) for variant in VARIANTS]
    with Progress() as progress:
        for variant, seed in progress.track(runs, description="training"):
            key = _key(variant, options, seed)
            if key in results:
                continue
            results[key] = train(arguments_of(variant, options, seed))
            write_json(results, KEPT)
            progress.console.print(f"{key}: {results[key]['iteration_seconds']['median']:.3f} s per iteration")
    tabulate(results, options)


if __name__ == "__main__":
    main()
