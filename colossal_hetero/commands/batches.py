"""``colossal-hetero batches``: deal a global batch to the devices of a profile."""

from __future__ import annotations

from pathlib import Path

import click

from .common import check_outputs, errors_on_one_line, make_console

__all__ = ["batches"]


@click.command()
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--global-batch", type=click.IntRange(min=1), required=True, help="Samples per optimizer step, in all.")
@click.option("--stage", type=click.IntRange(0, 3), help="Stage of ZeRO; default: the one that was profiled.")
@click.option(
    "--accumulation",
    type=click.Choice(["shared", "own"]),
    default="shared",
    show_default=True,
    help="Whether all devices run equally many micro-steps, or each its own number (stages 0 and 1).",
)
@click.option(
    "--method",
    type=click.Choice(["exact", "uniform", "flops", "adapt"]),
    default="exact",
    show_default=True,
    help="How the global batch is dealt.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the allocation as JSON.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw curves and timelines: .png, .pdf or .svg."
)
def batches(
    profile: Path,
    global_batch: int,
    stage: int | None,
    accumulation: str,
    method: str,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Deal a global batch to the devices of PROFILE, a JSON file that profiling wrote.

    Prints what each device gets, how long it is busy and how long it waits, and how other methods compare.
    """
    from ..planner.batches.batch_profile import load_profile
    from ..planner.batches.comparison import compare
    from ..planner.report.batch_table import render, save_report

    with errors_on_one_line():
        check_outputs(out, picture=plot)
        report = compare(load_profile(profile), global_batch, stage=stage, accumulation=accumulation, method=method)
        if out is not None:
            save_report(report, out)
        if plot is not None:
            from ..planner.report.batch_picture import plot_report

            plot_report(report, plot)
    make_console().print(render(report))
