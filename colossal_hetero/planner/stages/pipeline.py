"""A stage's slot, and the time and memory of a pipeline of unequal stages.

A model is a row of *blocks* and can be cut between any two of them; the embedding is part of the first block, norm and
head of the last. A stage holds at least one block and runs in a *slot*: a tensor-parallel group of devices of one kind
in one node. Slots are interchangeable if they share one ``LayerCosts`` object and have the same memory. *Bounds* say
which blocks a stage runs: ``[bounds[s], bounds[s + 1])``.

The time is AutoHet's Eq. 1, ``C = Σ t + (K − 1)·max t`` (docs/algorithms.md, 3, compares it with the simulation): the
first micro-batch passes through the empty pipeline, each further one takes a period of the longest stage.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts

# [Note: recomputation] A stage that runs its forward passes again in the backward passes needs less memory and never
# less time, so it recomputes if it fits only so. This holds for each stage alone, because neither what it sends nor its
# optimizer's step depend on it.


@dataclass(frozen=True)
class Slot:
    """A tensor-parallel group that can run one stage; ``LayerCosts`` objects are compared by identity."""

    name: str = field(compare=False)
    costs: LayerCosts
    memory_bytes: float
    recomputed: tuple[LayerCosts, float] | None = None
    """Costs and memory if the stage recomputes; see [Note: recomputation]. None: it may not."""
    training_speed: float | None = None


@dataclass(frozen=True)
class PipelineCost:
    """Time and memory of a split, by stage, by the formula (AutoHet, Eq. 1, without gradient synchronization).
    Times of passes and transfers are per micro-batch."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]  # time in steady state: one hop over each of the stage's two cuts
    hop_seconds: tuple[float, ...]
    """One transfer in one direction over the cut behind each stage except the last, ``[stages − 1]``."""
    update_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    stage_seconds: tuple[float, ...]  # t: forward, backward and transfer time
    fits: bool
    seconds: float  # ``Σ t + (K − 1)·max t`` plus the longest update
    recompute: tuple[bool, ...] = ()
    """True if each stage recomputes. Empty if no slot may."""


def evaluate(slots: Sequence[Slot], hops: Sequence[Channel], micro_batches: int, bounds: Sequence[int]) -> PipelineCost:
    """Time and memory of stages by the formula. ``hops`` are the channels between neighbors.

    A transfer keeps both of its stages busy, because the sender waits until the receiver has taken the message, as in
    Colossal-AI's schedule with NCCL. Activations and gradients are sent at the same time in steady state, so a stage
    spends one hop on each of its cuts per micro-batch, and ``Σ t`` contains every hop twice. Under 1F1B, stage s holds
    the activations of ``min(K, P − s)`` micro-batches.
    """
    forward, backward, update, memory = [], [], [], []
    stages = len(slots)
    fits, may_recompute, recompute = True, False, [False] * stages
    sent = [0.0]
    for s, slot in enumerate(slots):
        costs, available = slot.costs, slot.memory_bytes
        start, stop = bounds[s], bounds[s + 1]
        in_flight = min(micro_batches, stages - s)
        forwards, backwards, updates, states, activations = costs.running_totals
        used = states[stop] - states[start] + in_flight * (activations[stop] - activations[start])
        if slot.recomputed is not None:
            may_recompute, recompute[s] = True, used > available
            if used > available:
                costs, available = slot.recomputed
                forwards, backwards, updates, states, activations = costs.running_totals
                used = states[stop] - states[start] + in_flight * (activations[stop] - activations[start])
        memory.append(used)
        fits = fits and used <= available
        forward.append(forwards[stop] - forwards[start])
        backward.append(backwards[stop] - backwards[start])
        update.append(updates[stop] - updates[start])
        if s + 1 < stages:
            sent.append(_seconds_sent(hops[s], float(costs.output_bytes[stop - 1])))
    sent.append(0.0)
    transfer = [before + after for before, after in itertools.pairwise(sent)]
    times = [sum(parts) for parts in zip(forward, backward, transfer, strict=True)]
    return PipelineCost(
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        transfer_seconds=tuple(transfer),
        hop_seconds=tuple(sent[1:-1]),
        update_seconds=tuple(update),
        memory_bytes=tuple(memory),
        stage_seconds=tuple(times),
        fits=fits,
        seconds=sum(times) + (micro_batches - 1) * max(times) + max(update),
        recompute=tuple(recompute) if may_recompute else (),
    )


@functools.lru_cache(maxsize=4096)
def _seconds_sent(channel: Channel, message_bytes: float) -> float:
    return channel.seconds(message_bytes)
