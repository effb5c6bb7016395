"""Sailor's simulator and our model, with the same inputs, beside measured iterations.

Also: the times of GPT-Neo-2.7 on GH-96 that are in the files of a baseline in Sailor's repository
(``baselines/Metis/profiles``), beside those that we estimate, and the errors of our model with both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import print_markdown
from benchmarks.planner.peers.inputs import ZONE, prepare_copy
from benchmarks.planner.predicted_plans import MeasuredPlan, load_measured_plans, predict
from benchmarks.planner.published_clusters import DATA, MICRO_BATCHES, read_published
from colossal_hetero.planner.profile.layer_profile import ModelProfile

MODEL, GPU, GPUS_PER_NODE = "GPT-Neo-2.7", "GH-96", 4


def sailor_price(copy: Path, plan: MeasuredPlan, layers: int) -> tuple[float, float]:
    """Seconds of the iteration and of the sums of gradients, by Sailor's simulator."""
    sys.path.insert(0, str(copy))
    module: Any = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
    sys.path.remove(str(copy))
    planner = copy / "sailor" / "Planner"
    folder = planner / "sailor_planner" / "profiles" / plan.model
    times = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/profile.json")}
    stages = [
        [[[[each.gpu, GPUS_PER_NODE, ZONE]], each.tensor_parallel] for each in stage.replicas] for stage in plan.stages
    ]
    pipeline = {
        "num_stages": len(stages),
        "layers_per_stage": [list(range(*stage.layers)) for stage in plan.stages],
        "tmp_per_stage": stages,
        "dp": [len(stage) for stage in stages],
    }
    described = {"zone": ZONE, "mbs": plan.micro_batch, "gbs": plan.global_batch, "pipeline_list": [pipeline]}
    known = {"global_batch_size": plan.global_batch, "optimizer": "Adam", "model": plan.model, "num_all_layers": layers}
    sizes = json.loads((planner / "llm_info.json").read_text())
    with contextlib.redirect_stdout(io.StringIO()):
        simulator = module.Simulator(str(copy.parent), known, sizes, False, {plan.model: times}, ZONE)
        seconds, *_ = simulator.simulate_iteration_time(described)
        sums = simulator.estimate_sync_time(module.convert_homogeneous(described, known))
    return float(seconds), float(sums)


def with_measured_times(profile: ModelProfile, folder: Path) -> tuple[ModelProfile, list[list[str]]]:
    """The profile with the baseline's times of all passes, and rows that compare them with the estimated ones."""
    times, rows = [], []
    for each in profile.times:
        path = folder / GPU / f"mbs{each.micro_batch}_tmp{each.tensor_parallel}.json"
        if each.device == GPU and path.exists():
            found = json.loads(path.read_text())["execution_time"]["layer_compute_total_ms"]
            passes = [a + b for a, b in zip(each.forward_seconds, each.backward_seconds, strict=True)]
            ratios = [1e-3 * measured / estimated for measured, estimated in zip(found, passes, strict=True)]
            error = 1e3 * sum(passes) / sum(found) - 1
            rows.append(
                [f"{each.tensor_parallel}", f"{each.micro_batch}", f"{sum(found):.0f}", f"{100 * error:+.1f} %"]
            )
            each = each.model_copy(
                update={
                    name: tuple(a * b for a, b in zip(getattr(each, name), ratios, strict=True))
                    for name in ("forward_seconds", "backward_seconds")
                }
            )
        times.append(each)
    return profile.model_copy(update={"times": tuple(times)}), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument("--sailor", type=Path, required=True, help="checkout of Sailor's repository")
    arguments = parser.parse_args()
    profiles, channels, _ = read_published(arguments.data)
    models = {profile.name: profile for profile in profiles}
    baseline = arguments.sailor / "sailor" / "Planner" / "baselines" / "Metis" / "profiles" / MODEL
    measured, comparison = with_measured_times(models[MODEL], baseline)
    rows = []
    errors: dict[str, list[float]] = {"ours": [], "Sailor": []}
    with tempfile.TemporaryDirectory() as folder:
        copy = prepare_copy(arguments.sailor, Path(folder), profiles, channels, MICRO_BATCHES)
        for plan in load_measured_plans(arguments.data):
            ours = predict(plan, models[plan.model], channels)
            seconds, sums = sailor_price(copy, plan, models[plan.model].layers)
            both = {"ours": ours.iteration_seconds, "Sailor": seconds}
            error = {name: value / plan.iteration_seconds - 1 for name, value in both.items()}
            for name, value in error.items():
                errors[name].append(abs(value))
            other = "-"
            if plan.model == MODEL:
                other = (
                    f"{100 * (predict(plan, measured, channels).iteration_seconds / plan.iteration_seconds - 1):+.1f} %"
                )
            cells = [f"{100 * value:+.1f} %" for value in error.values()]
            gradients = [f"{value:.3f}" for value in (plan.gradient_seconds, ours.gradient_seconds, sums)]
            rows.append([plan.name, f"{plan.iteration_seconds:.3f}", *cells, other, *gradients])
    names = ["plan", "measured [s]", "ours", "Sailor", "ours with the baseline's times"]
    names += ["sums: measured [s]", "ours [s]", "Sailor [s]"]
    print_markdown("Errors of predicted iterations", names, rows)
    for name, found in errors.items():
        print(f"{name}: median {100 * median(found):.1f} %, mean {100 * mean(found):.1f} %")
    names = ["degree", "micro-batch", "all layers [ms]", "our estimate"]
    print_markdown(f"Times of {MODEL} on {GPU} in the baseline's files", names, comparison)


if __name__ == "__main__":
    main()
