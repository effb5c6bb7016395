"""Probe the devices of all ranks: their kinds, their speed, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..planner.cluster.link import MeasuredLink
from ..planner.cluster.topology import Topology
from ..processes.every_rank import on_every_rank
from .links import measure_links
from .rank_facts import make_topology, pairs_to_measure
from .this_machine import probe_this_rank

__all__ = ["probe_ranks"]


def probe_ranks(
    device: torch.device,
    cluster_of: Sequence[tuple[str, str]] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Topology, tuple[int, ...], list[MeasuredLink]]:
    """Measure the machines of the ranks of ``torch.distributed``. Collective over all ranks.

    Args:
        device: this rank's device.
        cluster_of: pairs of a host-name pattern and a cluster name, see :func:`.rank_facts.make_topology`.
        say: called with lines that describe the progress.

    Returns:
        The topology, the measured rank of each of its ranks, and the measured links.

    Raises:
        ValueError: machines cannot reach each other, or no host matches a pattern.
        RuntimeError: on every rank, if one failed; it names the rank and the error.
    """
    say(f"measuring {dist.get_world_size()} devices")
    facts = on_every_rank(lambda: probe_this_rank(device), "probing")
    rounds = pairs_to_measure(facts)
    own = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    groups = {"gloo": (torch.device("cpu"), own)}
    if all(fact.device != "cpu" for fact in facts):
        groups["nccl"] = (device, None if dist.get_backend() == "nccl" else dist.new_group(backend="nccl"))
    links: list[MeasuredLink] = []
    for protocol, (at, group) in groups.items():

        def show(number: int, count: int, protocol: str = protocol) -> None:
            if number == 0 or (number + 1) * 10 // count > number * 10 // count:
                say(f"measuring links over {protocol}: {number + 1} of {count}")

        links += measure_links(rounds, protocol, at, group, show)
    topology, order = make_topology(facts, links, cluster_of)
    return topology, order, links
