"""Times in the log of a Megatron-LM training run with ``--timing-log-level`` 1 or 2.

Megatron prints after some iterations, by default the smallest and the largest time over all ranks::

    (min, max) time across ranks (ms):
        forward-compute ................................: (1021.33, 1054.80)
        backward-compute ...............................: (2033.10, 2040.57)
        optimizer ......................................: (55.10, 55.12)

``forward-compute`` and ``backward-compute`` are sums over the micro-batches of one iteration.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from .whole_model import WholeModelTimes

__all__ = ["read_megatron_log"]

NUMBER = r"\d{1,15}(?:\.\d+)?"
TIMER = re.compile(
    rf"^\s*(?P<name>[a-z][\w-]*) \.*: *(?:\({NUMBER}, *(?P<most>{NUMBER})\)|(?P<only>{NUMBER}))\s*$", re.ASCII
)
"""Name of a timer, and its time: of the slowest rank if the fastest is there too."""
NEEDED = ("forward-compute", "backward-compute")
WARM_UP = 1
"""Printed groups of times that are left out, because first iterations take longer."""


def read_megatron_log(path: Path | str, micro_batches: int) -> WholeModelTimes:
    """The times of the whole model: medians over the printed iterations.

    Args:
        path: The log.
        micro_batches: Per iteration and rank.

    Raises:
        ValueError: The log cannot be read, has no such times, or they do not suffice: the message says what is missing.
    """
    found: dict[str, list[float]] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    for line in lines:
        timer = TIMER.match(line)
        if timer:
            found.setdefault(timer["name"], []).append(float(timer["most"] or timer["only"]))
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise ValueError(
            f"{path} has no times of {' and '.join(missing)}; run Megatron with --timing-log-level 2, and with "
            "--timing-log-option minmax, its default"
        )
    if "forward-recv" in found or "backward-send" in found:
        raise ValueError(
            f"{path} is of a run with pipeline stages; the log gives only the fastest and the slowest of them, which "
            "does not suffice for the times of layers. Log a run with --pipeline-model-parallel-size 1"
        )
    forward, backward = (_median(found[name]) / micro_batches / 1e3 for name in NEEDED)
    return WholeModelTimes(forward, backward, _median(found.get("optimizer", [0.0])) / 1e3)


def _median(values: Sequence[float]) -> float:
    """The median of the slowest rank's times, without the first ones if there are others."""
    return statistics.median(values[WARM_UP:] or values)
