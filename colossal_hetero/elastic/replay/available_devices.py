"""Which devices of a cluster are there at each moment of a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NamedTuple

from ...io.text import count
from ...planner.cluster.topology import Topology
from .availability_trace import AvailabilityRow

__all__ = ["Availability", "available_devices", "device_names"]


class Availability(NamedTuple):
    """The devices that are there from one moment on, until the next change."""

    seconds: float
    """From the start of the trace."""
    devices: frozenset[int]
    """Numbers of devices, as in the cluster file."""


def available_devices(
    rows: Sequence[AvailabilityRow], topology: Topology, *, seed: int = 0
) -> tuple[list[Availability], float]:
    """When the devices that are there change, and the seconds that the trace lasts.

    If a row does not name devices, and the number changes, a random choice says which ones leave or come.

    Args:
        rows: The trace, at least two rows.
        topology: The cluster.
        seed: Of the random choices.

    Raises:
        ValueError: A row needs more devices than the cluster has, or names one that it does not have, or names another
            number of them than its gpus. The message names the line.
    """
    names, chance = device_names(topology), random.Random(seed)
    start, present, changes = rows[0].seconds, frozenset[int](), list[Availability]()
    for row in rows:
        if row.gpus > len(topology.devices):
            raise ValueError(
                f"line {row.line} of the trace has {row.gpus} gpus, but the cluster has "
                f"{count(len(topology.devices), 'device')}; give a larger cluster"
            )
        if row.devices is not None:
            there = _named(row, names)
        elif row.gpus < len(present):
            there = present - frozenset(chance.sample(sorted(present), len(present) - row.gpus))
        else:
            absent = sorted(frozenset(range(len(topology.devices))) - present)
            there = present | frozenset(chance.sample(absent, row.gpus - len(present)))
        if (there != present and row is not rows[-1]) or not changes:
            changes.append(Availability(row.seconds - start, there))
        present = there
    return changes, rows[-1].seconds - start


def device_names(topology: Topology) -> dict[str, frozenset[int]]:
    """How a trace names devices: ``node/0`` is the first device of the node ``node``, and ``node`` is all of them."""
    names: dict[str, frozenset[int]] = {}
    for node in topology.nodes:
        names[node.name] = frozenset(node.devices)
        names.update({f"{node.name}/{place}": frozenset({device}) for place, device in enumerate(node.devices)})
    return names


def _named(row: AvailabilityRow, names: dict[str, frozenset[int]]) -> frozenset[int]:
    there: frozenset[int] = frozenset()
    for name in row.devices or ():
        if name not in names:
            close = get_close_matches(name, names, n=1)
            advice = f"; did you mean {close[0]}?" if close else "; a device is named NODE/NUMBER, from 0"
            raise ValueError(f"line {row.line} of the trace names {name}, which the cluster does not have{advice}")
        if twice := there & names[name]:
            raise ValueError(f"line {row.line} of the trace names device {min(twice)} of the cluster twice, by {name}")
        there |= names[name]
    if len(there) != row.gpus:
        raise ValueError(
            f"line {row.line} of the trace has {row.gpus} gpus, but names {count(len(there), 'device')}; they must be "
            "the same number"
        )
    return there
