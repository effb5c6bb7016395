"""The picture of a replay: devices that are there, and samples per second of each way, over time."""

from __future__ import annotations

from pathlib import Path

from ...io.pictures import BLUE, GRAY, ORANGE, RED, check_matplotlib, check_name, save_figure
from ...io.text import aligned
from .job_record import JobOutcome
from .replay import Replay, Way
from .replay_table import WAY_NAMES

__all__ = ["plot_replay"]

COLORS: dict[Way, str] = {"elastic": BLUE, "restart": ORANGE, "waiting": RED}


def plot_replay(replay: Replay, path: Path | str) -> None:
    """Draw the devices that are there, and below it the samples per second of each way, over time.

    The rate is 0 while a job recovers or waits. Iterations that do not count in the end are drawn like others; the
    number beside each way is its goodput, which does not count them.

    Args:
        replay: The replay.
        path: The picture file; the ending of its name sets the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The file name has no known picture format.
    """
    path = check_name(path)
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.6 * (1 + len(replay.jobs))), layout="constrained")
    axes = figure.subplots(1 + len(replay.jobs), 1, sharex=True)
    edges = [*(change.seconds for change in replay.changes), replay.seconds]
    axes[0].stairs([len(change.devices) for change in replay.changes], edges, fill=True, color=GRAY, baseline=0)
    axes[0].set_ylabel("devices", fontsize=9)
    axes[0].set_title("devices that are there", fontsize=10, loc="left")
    goodputs = aligned([replay.goodput(way) for way in replay.jobs])
    for axis, (way, job), goodput in zip(axes[1:], replay.jobs.items(), goodputs, strict=True):
        rates, borders = _rates(job, replay.global_batch)
        axis.stairs(rates, borders, fill=True, color=COLORS[way], baseline=0)
        axis.axhline(replay.ideal_goodput, color="#888888", linewidth=0.8, linestyle="--")
        axis.set_ylabel("samples/s", fontsize=9)
        axis.set_title(f"{WAY_NAMES[way]}: goodput {goodput} samples/s", fontsize=10, loc="left")
        axis.set_ylim(0, 1.08 * replay.ideal_goodput)
    for axis in axes:
        axis.set_xlim(0, replay.seconds)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("time [s]; dashed: all devices of the cluster all the time", fontsize=9)
    save_figure(figure, path)


def _rates(job: JobOutcome, global_batch: int) -> tuple[list[float], list[float]]:
    """Samples per second by span of the time line, and the borders of the spans in seconds."""
    rates = [global_batch / span.iteration_seconds if span.iteration_seconds else 0.0 for span in job.spans]
    return rates, [job.spans[0].start, *(span.stop for span in job.spans)]
