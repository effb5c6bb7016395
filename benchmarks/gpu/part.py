"""What the GPU suite consists of: parts, each with cases that are measured one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Case", "Machine", "Part", "Row"]

Row = Sequence[Any]
"""Cells of a row of the part's table, without the name of the case: texts and numbers."""


@dataclass(frozen=True)
class Machine:
    """Where the suite runs, and in which size."""

    device: torch.device
    """The device that is measured; the CPU if the suite only shows that it runs."""
    gpus: int
    """Number of GPUs."""
    is_tiny: bool
    """Whether cases use sizes that a CPU runs in a moment. Their figures mean nothing."""

    @property
    def free_bytes(self) -> int | None:
        """Free memory of the device; None if it is the CPU."""
        return None if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]


@dataclass(frozen=True)
class Case:
    """One measurement, which takes at most a minute or two, so that little is lost when a run is stopped."""

    name: str
    """Unique in the part. The first cell of the case's rows."""
    measure: Callable[[], Sequence[Row]]
    """Measures, and returns the rows. Any error is a failure of this case only."""
    memory_bytes: int = 0
    """Memory of the device that it needs; with less, it is listed as not fitting."""
    gpus: int = 0
    """Number of GPUs that it needs; 0 if a CPU can show that it runs."""


@dataclass(frozen=True)
class Part:
    """A subject of the suite, with one table."""

    name: str
    """As in the command line."""
    about: str
    """What is measured and how, and what the aim is, in a few sentences of Markdown."""
    columns: tuple[str, ...]
    """Names of the columns, the first of which is that of the case."""
    cases: Callable[[Machine], Sequence[Case]]
    """The cases for a machine. All of them are listed, also those that cannot run there."""
