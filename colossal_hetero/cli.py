"""The command ``colossal-hetero``: what can be planned without training. Starts without torch."""

from __future__ import annotations

from pathlib import Path

import click

from . import __version__

__all__ = ["main"]


class CommandError(click.ClickException):
    """What a user can mend; one line, no traceback."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="colossal-hetero")
def main() -> None:
    """Plan training on devices that are not equally fast."""


@main.command()
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
    from rich.console import Console

    from .figures import check_matplotlib, check_name
    from .planner.batch_profile import load_profile
    from .planner.batch_report import render, save_report
    from .planner.compare import compare

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    try:
        for path in (out, plot):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
        if plot is not None:
            check_name(plot)
            check_matplotlib()
        report = compare(load_profile(profile), global_batch, stage=stage, accumulation=accumulation, method=method)
        if out is not None:
            save_report(report, out)
        if plot is not None:
            from .planner.batch_pictures import plot_report

            plot_report(report, plot)
    except (ValueError, ImportError, OSError) as error:
        raise CommandError(" ".join(str(error).split())) from None
    console.print(render(report))


if __name__ == "__main__":
    main()
