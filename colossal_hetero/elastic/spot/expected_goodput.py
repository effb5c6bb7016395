"""What a job achieves per second on average, while spot nodes are taken away and come back.

[Note: expected goodput] In the state s, numbers of nodes of each type that take part, the job trains with the best plan
for these nodes, one iteration in x(s) seconds. The state s lasts a share π(s) of the time ([Note: nodes that come and
go] in ``node_states.py``). A node of type t is lost in s with the rate π(s)·n_t·λ_t. As often, on average, one of this
type comes back in the state without it. What these changes cost is computed from the plans themselves, one node after
the other:

- A node is lost whose devices the plan uses: a pause of a recovery and of what must be moved to the nodes that are
  left, and half an iteration on average, which must be repeated. If nobody else holds some layer, the job goes back to
  the last checkpoint, which is loaded instead of moving.
- A node comes with which the plan is faster: the others finish their iteration first, for half of it on average at
  their lower speed; then there is a pause of a join and of what must be moved.

A pause in a state that lasts 1/R on average is shorter if the state ends before it: (1 − e^(−R·p))/R on average for a
pause of p. So without going back, the goodput is the sum of π(s)/x(s) over all states, less the pauses at the speed of
the states they are in, less half an iteration per loss. If the job goes back ρ times per second in which it trains, at
random moments, and saves after each τ such seconds, a part ρτ/(e^(ρτ) − 1) of this is left: of e^(ρτ) − 1 intervals
that begin, ρτ reach their end, as of all jobs that are interrupted at random. A checkpoint counts once it is written, c
seconds later, which leaves another e^(−ρc). The sums neglect that a recovery that is interrupted begins again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.cluster.topology import Topology
from ...planner.prices.node_choice import NodeType
from ..replay.assumptions import Assumptions
from ..replay.fitted_plans import FitPlan, FittedPlan, is_faster
from ..state.held_layers import Holdings, has_every_layer
from .node_states import HOUR, NodeState, likely_states, ready_share, there_share

__all__ = ["ExpectedGoodput", "expected_goodput"]

COVERAGE, MOST_STATES = 0.999, 64
"""States of so much probability are planned for, or so many. In all others the job counts as waiting."""


@dataclass(frozen=True)
class ExpectedGoodput:
    """Averages over a long time."""

    iterations_per_second: float
    dollars_per_hour: float
    """Nodes are paid for while they are there, also while their processes start."""
    lost_share: float
    """Of what would be done without pauses and repeated iterations, how much they cost."""
    covered: float
    """Probability of the states that were planned for."""

    @property
    def iteration_seconds(self) -> float:
        """Seconds per iteration that counts; infinite if none ever does."""
        return 1.0 / self.iterations_per_second if self.iterations_per_second > 0 else math.inf

    @property
    def dollars_per_iteration(self) -> float:
        return self.dollars_per_hour / HOUR * self.iteration_seconds


def expected_goodput(
    topology: Topology,
    types: Sequence[NodeType],
    counts: Sequence[int],
    fit_plan: FitPlan,
    assumptions: Assumptions,
) -> ExpectedGoodput:
    """The expected goodput of a job on so many nodes of each type.

    Args:
        topology: all machines, with the terms of spot nodes.
        types: of nodes, see ``node_types``.
        counts: by type, the nodes that the job has when none is gone.
        fit_plan: finds plans for devices of ``topology``.
        assumptions: what recoveries and joins cost, and how long processes take to start.
    """
    terms = [topology.nodes[each.nodes[0]].spot for each in types]
    shares = [ready_share(each, assumptions.start_seconds) for each in terms]
    rates = [0.0 if each is None else each.preemptions_per_hour / HOUR for each in terms]
    states = likely_states(counts, shares, COVERAGE, MOST_STATES)
    chain = _Chain(topology, types, counts, rates, shares, fit_plan, assumptions)
    whole = sum(state.probability * chain.speed(state.counts) for state in states)
    lost = sum(chain.lost(state) for state in states)
    dollars = sum(
        count * each.dollars_per_hour * there_share(term)
        for count, each, term in zip(counts, types, terms, strict=True)
    )
    training = sum(state.probability for state in states if chain.speed(state.counts) > 0)
    going_back = sum(map(chain.going_back, states))
    goodput = max(whole - lost, 0.0) * _left_after_going_back(going_back, whole, training, assumptions)
    return ExpectedGoodput(
        goodput, dollars, 1.0 - goodput / whole if whole > 0 else 0.0, sum(state.probability for state in states)
    )


def _left_after_going_back(
    going_back: float, iterations_per_second: float, training: float, assumptions: Assumptions
) -> float:
    """The share of the work that is not lost if the job goes back to a checkpoint so many times per second.

    Args:
        going_back: times per second, as an average over all time.
        iterations_per_second: the same.
        training: the share of the time in which the job trains.
        assumptions: how often it saves, and how long that takes.
    """
    if not going_back:
        return 1.0
    intervals = going_back * assumptions.save_every / iterations_per_second
    # x / (e^x − 1), written so that it does not overflow.
    left = -intervals * math.exp(-intervals) / math.expm1(-intervals)
    return left * math.exp(-going_back / training * assumptions.save_seconds)


class _Chain:
    """The states of a job and what the changes between them cost; arguments as for :func:`expected_goodput`."""

    def __init__(
        self,
        topology: Topology,
        types: Sequence[NodeType],
        counts: Sequence[int],
        rates: Sequence[float],
        shares: Sequence[float],
        fit_plan: FitPlan,
        assumptions: Assumptions,
    ) -> None:
        self._topology, self._types, self._counts, self._rates = topology, types, tuple(counts), rates
        self._fit_plan, self._assumptions = fit_plan, assumptions
        # As many nodes come in the long run as are lost: the rate at which a node that is missing comes.
        self._coming = [
            rate * share / (1 - share) if share < 1 else 0.0 for rate, share in zip(rates, shares, strict=True)
        ]
        self._plans: dict[tuple[int, ...], FittedPlan | None] = {}

    def speed(self, counts: tuple[int, ...]) -> float:
        """Iterations per second while these nodes take part."""
        plan = self._plan(counts)
        return 0.0 if plan is None else 1.0 / plan.iteration_seconds

    def lost(self, state: NodeState) -> float:
        """Iterations per second that losses of nodes in this state cost, and that these nodes come back; without those
        since a checkpoint to which the job goes back."""
        plan = self._plan(state.counts)
        total = 0.0
        for number, nodes in enumerate(self._nodes(state.counts)):
            if not nodes or not self._rates[number]:
                continue
            without = tuple(count - (place == number) for place, count in enumerate(state.counts))
            losses = sum(self._of_a_loss(plan, state.counts, without, node) for node in nodes)
            joins = len(nodes) * self._of_a_join(plan, state.counts, without, nodes[-1])
            total += state.probability * self._rates[number] * (losses + joins)
        return total

    def going_back(self, state: NodeState) -> float:
        """How many times per second the job goes back to a checkpoint from this state."""
        plan = self._plan(state.counts)
        return state.probability * sum(
            self._rates[number] * (self._is_used(plan, node) and self._left(plan, node) is None)
            for number, nodes in enumerate(self._nodes(state.counts))
            for node in nodes
            if plan is not None
        )

    def _is_used(self, plan: FittedPlan, node: int) -> bool:
        return any(device in plan.holdings for device in self._topology.nodes[node].devices)

    def _left(self, plan: FittedPlan, node: int) -> Holdings | None:
        """What the others hold without this node; None if nobody holds some layer."""
        devices = self._topology.nodes[node].devices
        held = {device: layers for device, layers in plan.holdings.items() if device not in devices}
        return held if has_every_layer(held, plan.holdings) else None

    def _of_a_loss(
        self, plan: FittedPlan | None, counts: tuple[int, ...], without: tuple[int, ...], node: int
    ) -> float:
        """Iterations that it costs when this node is lost."""
        if plan is None or not self._is_used(plan, node):
            return 0.0
        held = self._left(plan, node)
        left = self._fit_plan(self._devices(counts) - frozenset(self._topology.nodes[node].devices), held or {})
        if left is None:
            return 0.5
        move = self._assumptions.load_seconds if held is None else left.move_seconds
        return 0.5 + self._pause(without, self._assumptions.recovery_seconds + move) / left.iteration_seconds

    def _of_a_join(
        self, plan: FittedPlan | None, counts: tuple[int, ...], without: tuple[int, ...], node: int
    ) -> float:
        """Iterations that it costs when this node comes."""
        before = self._plan(without)
        if plan is None or (before is not None and not is_faster(plan, before)):
            return 0.0
        move, slower = self._assumptions.load_seconds, 0.0
        if before is not None:
            joined = self._fit_plan(self._devices(counts), before.holdings)
            assert joined is not None, "the same devices as before"
            move, slower = joined.move_seconds, 0.5 * (before.iteration_seconds / plan.iteration_seconds - 1.0)
        return slower + self._pause(counts, self._assumptions.join_seconds + move) / plan.iteration_seconds

    def _pause(self, counts: tuple[int, ...], seconds: float) -> float:
        """The expected part of a pause before the state that it is in ends."""
        missing = [count - present for count, present in zip(self._counts, counts, strict=True)]
        rate = sum(
            present * lost + absent * comes
            for present, absent, lost, comes in zip(counts, missing, self._rates, self._coming, strict=True)
        )
        return -math.expm1(-rate * seconds) / rate if rate > 0 else seconds

    def _plan(self, counts: tuple[int, ...]) -> FittedPlan | None:
        if counts not in self._plans:
            self._plans[counts] = self._fit_plan(self._devices(counts), {})
        return self._plans[counts]

    def _devices(self, counts: Sequence[int]) -> frozenset[int]:
        nodes = (node for alike in self._nodes(counts) for node in alike)
        return frozenset(device for node in nodes for device in self._topology.nodes[node].devices)

    def _nodes(self, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Which nodes take part in a state, by type: the first ones."""
        return [each.nodes[:count] for each, count in zip(self._types, counts, strict=True)]
