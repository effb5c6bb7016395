"""``colossal-hetero batches``: divide a global batch over the devices of a profile."""

from __future__ import annotations

from pathlib import Path

import click

from .common import (
    check_outputs,
    choice_option,
    errors_on_one_line,
    file_option,
    global_batch_option,
    make_console,
    profile_argument,
)


@click.command()
@profile_argument
@global_batch_option
@click.option("--stage", type=click.IntRange(0, 3), help="Stage of ZeRO; default: the stage of the profile.")
@choice_option(
    "--accumulation",
    *("shared", "per_rank"),
    help="Number of micro-steps per global batch: the same on all devices, or its own on each (stages 0 and 1).",
)
@choice_option(
    "--method", *("exact", "uniform", "flops", "adapt", "poplar"), help="Rule that divides the global batch."
)
@file_option("--cluster", "Cluster file of the same ranks, as colossal-hetero probe writes it; adapt uses its links.")
@file_option("--out", "Write the division to this JSON file.")
def batches(
    profile: Path,
    global_batch: int,
    stage: int | None,
    accumulation: str,
    method: str,
    cluster: Path | None,
    out: Path | None,
) -> None:
    """Divide a global batch over the devices of PROFILE, a JSON file that profiling wrote.

    Prints each device's samples, compute time and waiting time, and compares the methods.
    """
    from ..planner.batches.adapt import with_cluster_links
    from ..planner.batches.batch_profile import load_profile
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.report.batch_report import compare, render, save_report

    with errors_on_one_line():
        check_outputs(out)
        loaded = load_profile(profile)
        if cluster is not None:
            loaded = with_cluster_links(loaded, load_cluster(cluster))
        report = compare(loaded, global_batch, stage=stage, accumulation=accumulation, method=method)
        if out is not None:
            save_report(report, out)
    make_console().print(render(report))
