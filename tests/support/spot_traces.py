"""Random traces of spot nodes: each is there, and gone, for exponential times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colossal_hetero.elastic.replay.available_devices import Availability
from colossal_hetero.planner.cluster.topology import Topology

__all__ = ["random_trace"]


def random_trace(topology: Topology, nodes: Sequence[int], seconds: float, seed: int) -> list[Availability]:
    """When the devices of these nodes that are there change; at first each node is there as often as on average."""
    random = np.random.default_rng(seed)
    changes: list[tuple[float, int, bool]] = []
    there = set[int]()
    for node in nodes:
        terms = topology.nodes[node].spot
        if terms is None:
            there.add(node)
            continue
        up, down = 3600.0 / terms.preemptions_per_hour, 60.0 * terms.replacement_minutes
        is_there = random.random() < up / (up + down)
        if is_there:
            there.add(node)
        now = 0.0
        while (now := now + random.exponential(up if is_there else down)) < seconds:
            is_there = not is_there
            changes.append((now, node, is_there))

    def devices() -> frozenset[int]:
        return frozenset(device for node in there for device in topology.nodes[node].devices)

    trace = [Availability(0.0, devices())]
    for moment, node, comes in sorted(changes):
        there.symmetric_difference_update({node})
        assert (node in there) == comes
        trace.append(Availability(moment, devices()))
    return trace
