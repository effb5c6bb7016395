"""How likely it is that so many spot nodes are there.

[Note: nodes that come and go] A node is there for a time of mean 1/λ, and gone for a time of mean 1/μ; nodes do not
depend on each other. A node that has come takes part once its processes have started, after s seconds, if it is still
there. Times that nodes are there are exponential, so a part e^(−λs) of the nodes that come ever takes part, and these
stay for another 1/λ on average. Of a cycle of 1/λ + 1/μ, a node takes part e^(−λs)/λ on average. So each node takes
part a share r = e^(−λs) / (1 + λ/μ) of the time, the number of n such nodes that do is binomial, and for this the times
that nodes are gone need not be exponential. A node that takes part is lost λ times per second.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...planner.cluster.topology import SpotTerms

__all__ = ["NodeState", "likely_states", "ready_share", "there_share"]

HOUR, MINUTE = 3600.0, 60.0


@dataclass(frozen=True)
class NodeState:
    """So many nodes of each type take part."""

    counts: tuple[int, ...]
    """By type."""
    probability: float
    """The share of the time in which exactly these numbers of nodes take part."""


def there_share(terms: SpotTerms | None) -> float:
    """The share of the time in which a node is there, and is paid for."""
    if terms is None:
        return 1.0
    return 1.0 / (1.0 + terms.preemptions_per_hour / HOUR * terms.replacement_minutes * MINUTE)


def ready_share(terms: SpotTerms | None, start_seconds: float) -> float:
    """The share of the time in which a node takes part; see [Note: nodes that come and go]."""
    if terms is None:
        return 1.0
    return there_share(terms) * math.exp(-terms.preemptions_per_hour / HOUR * start_seconds)


def likely_states(counts: Sequence[int], shares: Sequence[float], coverage: float, most: int) -> list[NodeState]:
    """The states with the highest probabilities, the most likely first.

    Args:
        counts: nodes of each type.
        shares: by type, the share of the time in which a node takes part.
        coverage: so much probability is enough.
        most: so many states at most.
    """
    tables = [
        [math.comb(count, number) * share**number * (1 - share) ** (count - number) for number in range(count + 1)]
        for count, share in zip(counts, shares, strict=True)
    ]
    states: list[NodeState] = []
    covered = 0.0
    for state in _descending(tables):
        states.append(state)
        covered += state.probability
        if covered >= coverage or len(states) >= most:
            break
    return states


def _descending(tables: Sequence[Sequence[float]]) -> Iterator[NodeState]:
    """All states in the order of their probabilities."""
    # A binomial distribution falls on both sides of its largest value, so a state's neighbors toward it come first.
    orders = [sorted(range(len(table)), key=table.__getitem__, reverse=True) for table in tables]

    def state(places: tuple[int, ...]) -> NodeState:
        counts = tuple(order[place] for order, place in zip(orders, places, strict=True))
        return NodeState(counts, math.prod(table[count] for table, count in zip(tables, counts, strict=True)))

    first = (0,) * len(tables)
    open_, seen = [(-state(first).probability, first)], {first}
    while open_:
        _, places = heapq.heappop(open_)
        yield state(places)
        for number, order in enumerate(orders):
            if places[number] + 1 < len(order):
                following = (*places[:number], places[number] + 1, *places[number + 1 :])
                if following not in seen:
                    seen.add(following)
                    heapq.heappush(open_, (-state(following).probability, following))
