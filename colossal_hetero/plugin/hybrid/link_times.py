"""Times of the messages between the stages of a pipeline, from which slow links are told.

A message starts when its sender has it, and arrives when its receiver has it. The clocks of two ranks differ, so only
the sum of a message to a neighbor and one from it is known, as in NTP (RFC 5905): the time of one is half of the sum.
The shortest one of an iteration counts, because others wait for messages before them, or until the receiver is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...colossalai_support.accelerator import recorded_event
from ...common.methods import wrap_method
from ...planner.cluster.topology import Topology
from ...planner.cost.placement import NodeLinks
from ...planner.cost.plan import Plan
from ...planner.solver.follow import GAIN, WINDOW, LinkDrift


@dataclass(frozen=True)
class NeighborMessages:
    """The messages of one iteration between a rank and a neighbor, in seconds of the rank's clock."""

    sent: list[float]  # when each message to the neighbor started
    received: list[tuple[float, float]]
    """When the rank began to wait for each message of the neighbor, and when it had arrived."""
    message_bytes: int  # of those that were received


ByNeighbor = Mapping[int, Mapping[int, NeighborMessages]]
"""A rank's messages: ``[rank of the neighbor][iteration]``."""


def message_seconds(ours: NeighborMessages, theirs: NeighborMessages) -> float | None:
    """Seconds of one message between two ranks in one iteration; None if a receiver always came too late to tell."""
    delays, waits = 0.0, []
    for sent, received in ((ours.sent, theirs.received), (theirs.sent, ours.received)):
        if not sent or len(sent) != len(received):
            return None
        pairs = [(arrived - start, arrived - begin) for start, (begin, arrived) in zip(sent, received, strict=True)]
        delay, wait = min(pairs)
        delays += delay
        waits.append(wait)
    # A receiver that came later than the message waits only as long as reading takes. Clocks that do not run alike hide
    # what takes no time.
    return delays / 2 if min(waits) >= delays / 4 > 0 else None


def compare_links(plan: Plan, topology: Topology, of_ranks: Sequence[ByNeighbor]) -> tuple[LinkDrift, ...]:
    """The links between nodes over which ranks have sent messages, beside ``topology``, from the messages of each rank.
    Messages that share a network card may take as long as one alone, or as when all are sent at once; neither is a
    change. A message inside a node rather shows how fast its processor is."""
    micro_batches = max(replica.micro_batches for replica in plan.replicas)
    links = NodeLinks(topology, 1.0)
    nodes = [[topology.devices[stage.ranks[0]].node for stage in replica.stages] for replica in plan.replicas]
    found = []
    hops = links.hops(nodes, plan.tensor_parallel)
    for ways, numbers, replica in zip(map(pairwise, nodes), hops, plan.replicas, strict=True):
        for way, number, ends in zip(ways, numbers, pairwise(replica.stages), strict=True):
            if way[0] == way[1] or number < 0:  # the machines have no such link
                continue
            for rank, other in map(sorted, zip(*(end.ranks for end in ends), strict=True)):
                ours, theirs = of_ranks[rank].get(other, {}), of_ranks[other].get(rank, {})
                known = [message_seconds(ours[each], theirs[each]) for each in ours.keys() & theirs.keys()]
                seconds = [each for each in known if each is not None]
                if not seconds:
                    continue
                measured, size = median(seconds), max(each.message_bytes for each in (*ours.values(), *theirs.values()))
                alone, shared = (each.seconds(size) for each in (topology.channel(rank, other), links.channels[number]))
                planned = min(max(measured, alone), shared)
                first, second = (topology.nodes[topology.devices[each].node].name for each in (rank, other))
                link = LinkDrift((rank, other), (first, second), size, measured, planned, matters=False)
                matters = link.changed and abs(measured - planned) * micro_batches > GAIN * plan.iteration_seconds
                found.append(replace(link, matters=matters))
    return tuple(found)


_METHODS = {
    "send_forward": (1, True, False),
    "recv_backward": (1, False, True),
    "send_forward_recv_backward": (1, True, True),
    "send_backward": (-1, True, False),
    "recv_forward": (-1, False, True),
    "send_backward_recv_forward": (-1, True, True),
}
"""Of ``PipelineP2PCommunication``: the neighbor, 1 for the next stage, and whether it sends to it and receives."""


class _Events:
    """Events of the messages of one iteration with one neighbor."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.received: list[tuple[Any, Any]] = []
        self.message_bytes = 0

    def are_reached(self) -> bool:
        return all(each.query() for each in self.sent) and all(end.query() for _, end in self.received)

    def read(self, start: Any) -> NeighborMessages:
        def seconds(event: Any) -> float:
            return float(start.elapsed_time(event)) * 1e-3

        received = [(seconds(begin), seconds(end)) for begin, end in self.received]
        return NeighborMessages([seconds(each) for each in self.sent], received, self.message_bytes)


class LinkClock:
    """Times the messages of a 1F1B schedule, whose ``comm`` is given. Like those of :class:`.StageClock`, events are
    read when the device has reached them. Only the last iterations are kept."""

    def __init__(self, comm: Any) -> None:
        self._ranks = {1: comm.stage_manager.get_next_rank, -1: comm.stage_manager.get_prev_rank}
        self._start: Any = None
        self._events = {1: _Events(), -1: _Events()}
        self._iterations = 0
        self._running: deque[tuple[int, Any, dict[int, _Events]]] = deque(maxlen=WINDOW)
        for name, kind in _METHODS.items():
            wrap_method(comm, name, partial(self._timed, *kind))

    def _timed(
        self, neighbor: int, sends: bool, receives: bool, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return method(*args, **kwargs)
        begin = recorded_event()
        self._start = self._start or begin
        result = method(*args, **kwargs)
        events = self._events[neighbor]
        if sends:
            events.sent.append(begin)
        if receives:
            events.received.append((begin, recorded_event()))
            events.message_bytes = sum(each.nbytes for each in tree_leaves(result[0]) if isinstance(each, torch.Tensor))
        return result

    def end_iteration(self, counts: bool = True) -> None:
        if counts and self._start is not None:
            self._running.append((self._iterations, self._start, self._events))
        self._start, self._events = None, {1: _Events(), -1: _Events()}
        self._iterations += 1

    def read(self) -> ByNeighbor:
        """The messages of the last iterations since the last call."""
        found: dict[int, dict[int, NeighborMessages]] = {}
        for iteration, start, events in self._running:
            if all(each.are_reached() for each in events.values()):
                for neighbor, each in events.items():
                    if each.sent and each.received:
                        found.setdefault(self._ranks[neighbor](), {})[iteration] = each.read(start)
        self._running.clear()
        return found
