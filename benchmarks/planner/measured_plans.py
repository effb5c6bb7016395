"""Predict the iteration time of plans that others ran on up to 32 GH200, and compare it with the measured time.

Predictions use layer times and bandwidths only; nothing is fitted to the iterations. Layers, links and plans were
measured by the authors of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich), training with
Megatron-DeepSpeed. `predicted_plans.py` states the assumptions, and `sailor_tables.py` how the tables are read. The
times of GPT-Neo-2.7 on GH200 are estimated (`published_clusters.py`) for micro-batches of up to 8, which plans use.
Fitted to all timed sizes, up to 128, the median error over all plans is 6.5 % instead of 5.9 %.

Predictions are by the formula that the planner searches with, and include the gradient reduction. Memory is that of the
GPU that uses most; the measured value is from nvidia-smi.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from benchmarks.common import print_markdown, read_options
from benchmarks.planner.predicted_plans import MeasuredPlan, load_measured_plans, predict
from benchmarks.planner.published_clusters import DATA, read_published

TARGET_PERCENT = 6
SAILOR_PERCENT = "8.0 % (mean 12.5 %) over all of its published plans, which are more than these"


def implausible(plan: MeasuredPlan, pipeline_seconds: float) -> str:
    """Why the measurements of a plan contradict each other; "" if they do not."""
    rest = plan.iteration_seconds - plan.gradient_seconds
    if rest < 0.5 * pipeline_seconds:
        return (
            f"{plan.name}: {plan.gradient_seconds:.3f} s of {plan.iteration_seconds:.3f} s for gradients leave "
            f"{rest:.3f} s for passes that take {pipeline_seconds:.3f} s by layer times: one of them is a misprint"
        )
    return ""


def statistics(errors: Sequence[float], which: str) -> str:
    absolute = [abs(each) for each in errors]
    percent = f"median error {100 * median(absolute):.1f} %, mean {100 * mean(absolute):.1f} %"
    return f"{which}: {percent}, {len(absolute)} plans"


def main() -> None:
    arguments = read_options(__doc__, data=DATA)
    published = read_published(arguments.data)
    models = {profile.name: profile for profile in published.profiles}
    rows = []
    errors, plausible, misprints, repeated = [], [], [], []
    by_model: dict[str, list[float]] = {}
    reductions, memory = [], []
    for plan in load_measured_plans(arguments.data):
        predicted = predict(plan, models[plan.model], published.channels)
        error = predicted.iteration_seconds / plan.iteration_seconds - 1
        errors.append(error)
        by_model.setdefault(plan.model, []).append(error)
        reason = implausible(plan, predicted.pipeline.seconds)
        if reason:
            misprints.append(reason)
        else:
            plausible.append(error)
        if plan.replicas > 1 and not reason:
            reductions.append(plan.gradient_seconds / predicted.gradient_seconds)
        memory.append(predicted.memory_bytes / plan.memory_bytes - 1)
        if plan.micro_batches > 1:
            repeated.append(error)
        degree = plan.stages[0].replicas[0].tensor_parallel
        shape = f"{len(plan.stages)} × {plan.replicas} × {degree}", f"{plan.micro_batches} × {plan.micro_batch}"
        times = f"{plan.iteration_seconds:.3f}", f"{predicted.iteration_seconds:.3f}"
        sums = f"{plan.gradient_seconds:.3f}", f"{predicted.gradient_seconds:.3f}"
        used = f"{plan.memory_bytes / 1e9:.1f}", f"{predicted.memory_bytes / 1e9:.1f}", f"{100 * memory[-1]:+.1f} %"
        rows.append([plan.name, *shape, *times, f"{100 * error:+.1f} %" + " (?)" * bool(reason), *sums, *used])
    columns = ["plan", "stages × replicas × TP", "micro-batches × size", "measured [s]", "predicted [s]", "error"]
    columns += ["gradients: measured [s]", "predicted [s]", "memory: measured [GB]", "predicted [GB]", "error"]
    print_markdown("Iterations that were measured by others, and predictions", columns, rows)
    print(statistics(errors, "All"))
    if misprints:
        print(statistics(plausible, "Without those marked (?)"))
    for model, of_model in by_model.items():
        print(statistics(of_model, model))
    print(statistics(repeated, "More than one micro-batch per iteration"))
    print(
        f"Gradient reduction: measured over predicted time {min(reductions):.1f} to {max(reductions):.1f}, median "
        f"{median(reductions):.1f}. Memory: error {100 * min(memory):+.1f} to {100 * max(memory):+.1f} %, "
        f"{sum(abs(each) <= 0.1 for each in memory)} of {len(memory)} within 10 %."
    )
    print(f"Aim: at most {TARGET_PERCENT} % (median). Sailor's own simulator: {SAILOR_PERCENT}.")
    for note in (*misprints, *published.notes):
        print(note)


if __name__ == "__main__":
    main()
