"""The availability trace, a CSV file: how many devices, or which ones, are there over time.

``docs/file-formats.md`` describes it.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ...io.json_files import errors_in_words, read_text
from ...io.quantities import NonNegative, Seconds
from ...io.schema import FilePart

__all__ = ["AvailabilityRow", "load_availability"]

REQUIRED, OPTIONAL = ("seconds", "gpus"), "devices"


class AvailabilityRow(FilePart):
    """What is there from one moment on, until the next row."""

    line: int
    """Line of the file, for messages."""
    seconds: Seconds
    """The moment, on any clock; only differences between rows count."""
    gpus: NonNegative
    """Number of devices that are there."""
    devices: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Which ones, see :func:`~.available_devices.device_names`. None: the trace does not say."""


def load_availability(path: Path | str) -> tuple[AvailabilityRow, ...]:
    """Read an availability trace: its rows in ascending order of time. The last row is the end of the trace.

    Raises:
        ValueError: There is no such file, it is not CSV, or a column or a row is wrong. The message names the line.
    """
    reader = csv.reader(io.StringIO(read_text(path, "CSV"), newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    if not lines:
        raise ValueError(f"{path} is empty; the first line of a trace is seconds,gpus")
    header = [name.strip() for name in lines[0][1]]
    columns = [*REQUIRED, *([OPTIONAL] if OPTIONAL in header else [])]
    if sorted(header) != sorted(columns):
        raise ValueError(
            f"{path}, line 1: the columns are {', '.join(header)}; a trace has seconds, gpus and, if it says which "
            "devices are there, devices"
        )
    rows = [_row(f"{path}, line {number}", number, header, cells) for number, cells in lines[1:] if any(cells)]
    for one, other in itertools.pairwise(rows):
        if other.seconds <= one.seconds:
            raise ValueError(
                f"{path}, line {other.line}: seconds is {other.seconds:g}, but line {one.line} has {one.seconds:g}; "
                "each row must be later than the one before it"
            )
    if len(rows) < 2:
        raise ValueError(f"{path} has {len(rows)} rows; a trace has at least 2, the last one is its end")
    return tuple(rows)


def _row(place: str, line: int, header: Sequence[str], cells: Sequence[str]) -> AvailabilityRow:
    if len(cells) != len(header):
        raise ValueError(f"{place} has {len(cells)} values, but there are {len(header)} columns: {', '.join(header)}")
    fields: dict[str, object] = {name: cell.strip() for name, cell in zip(header, cells, strict=True)}
    if OPTIONAL in fields:
        fields[OPTIONAL] = tuple(str(fields[OPTIONAL]).split())
    try:
        row = AvailabilityRow.model_validate({**fields, "line": line})
    except ValidationError as error:
        raise ValueError(f"{place}: {errors_in_words(error, [*REQUIRED, OPTIONAL])}") from None
    if row.devices is not None and len(set(row.devices)) < len(row.devices):
        twice = next(name for name in row.devices if row.devices.count(name) > 1)
        raise ValueError(f"{place}: devices names {twice} twice; name each device once")
    return row
