"""A replay as a table, and as the content of a JSON file."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...io.text import aligned, count
from .assumptions import Assumptions
from .replay import Replay, Way

__all__ = ["WAY_NAMES", "render_replay", "replay_content"]

SCHEMA = 1
"""Version of the JSON file."""

WAY_NAMES: dict[Way, str] = {
    "elastic": "this package",
    "restart": "restart from a folder",
    "waiting": "waiting",
}


def render_replay(replay: Replay) -> RenderableType:
    """A row for each way, and the goodput of this package relative to the others."""
    jobs = replay.jobs
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("\nway")
    names = (
        *("\nsamples", "goodput\n[samples/s]", "of ideal\n[%]", "recover-\nies", "recovering\n[s]"),
        *("repeated\niterations", "waiting\n[s]"),
    )
    for name in names:
        # In a plain string rich would read the brackets as markup.
        table.add_column(Text(name), justify="right", no_wrap=True)
    goodputs = aligned([replay.goodput(way) for way in jobs])
    for (way, job), goodput in zip(jobs.items(), goodputs, strict=True):
        name = f"{WAY_NAMES[way]} for {count(replay.wait_for, 'device')}" if way == "waiting" else WAY_NAMES[way]
        cells = [name, f"{replay.samples(way):,}", goodput, f"{100 * replay.goodput(way) / replay.ideal_goodput:.1f}"]
        cells += (f"{job.recoveries:,}", f"{job.seconds('recovering'):,.0f}")
        cells += (f"{job.repeated:,}", f"{job.seconds('waiting'):,.0f}")
        table.add_row(*(Text(cell) for cell in cells))
    there = [len(change.devices) for change in replay.changes]
    (ideal,) = aligned([replay.ideal_goodput])
    lines = [
        f"{replay.seconds:,.0f} s, {count(len(there) - 1, 'change')}, {min(there)} to {max(there)} devices; "
        f"all devices of the cluster all the time: {ideal} samples/s",
        *(_compared(replay, other) for other in ("restart", "waiting")),
    ]
    return Group(table, *(Text(line) for line in lines))


def _compared(replay: Replay, other: Way) -> str:
    ratio = replay.ratio("elastic", other)
    if ratio is None:
        return f"{WAY_NAMES[other]}: no iteration counts"
    return f"goodput of this package / {WAY_NAMES[other]}: {ratio:.2f}"


def replay_content(replay: Replay, assumptions: Assumptions, **sources: Any) -> dict[str, Any]:
    """A replay as the content of a JSON file.

    Args:
        replay: The replay.
        assumptions: What it was simulated with.
        sources: Further fields, such as the names of the files.
    """
    return {
        "schema": SCHEMA,
        **sources,
        "global_batch": replay.global_batch,
        "seconds": replay.seconds,
        "ideal_samples_per_second": replay.ideal_goodput,
        "wait_for": replay.wait_for,
        "assumptions": dataclasses.asdict(assumptions),
        "availability": [{"seconds": change.seconds, "devices": sorted(change.devices)} for change in replay.changes],
        "ways": [
            {
                "way": way,
                "iterations": job.iterations,
                "samples": replay.samples(way),
                "samples_per_second": replay.goodput(way),
                "share_of_ideal": replay.goodput(way) / replay.ideal_goodput,
                "recoveries": job.recoveries,
                "recovering_seconds": job.seconds("recovering"),
                "repeated_iterations": job.repeated,
                "waiting_seconds": job.seconds("waiting"),
                "spans": [span._asdict() for span in job.spans],
            }
            for way, job in replay.jobs.items()
        ],
    }
