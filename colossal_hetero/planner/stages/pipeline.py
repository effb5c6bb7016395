"""A pipeline of unequal stages: what is to be divided, and what a division costs in time and memory.

A model is a row of *blocks* between which it can be cut. What comes before the first block (embedding) and after the
last (norm, head) belongs to these blocks: a stage holds at least one block, so it lies where they lie.

A stage runs in a *slot*: a tensor-parallel group of devices of one kind in one node. Slots that share one
``LayerCosts`` object and the same memory are interchangeable.

`[Note: closed form]`  AutoHet's Eq. 1, ``C = Σ t + (K − 1)·max t``: one micro-batch through the empty pipeline, then
one more per period of the longest stage. Against the event simulation (``simulation.py``; F, B forward and backward,
h the hops, t = F + B + the hops of both cuts, K micro-batches, P stages):

- The period is right: in every cycle of what waits for what, forwards and backwards of a stage come in pairs.
- Never below: the simulation takes ``Σ_{q<c} t_q + K·t_c`` or more for every stage c, and ``Σ t`` (with ``blocking``
  transfers). So C is above the simulation by no more than the time of the stages behind the longest one, and by nothing
  if K = 1 or the last stage is the longest: then both are equal.
- C counts the stages behind the longest one as if they only worked before it starts and after it ends, but warm-up and
  cool-down fill that time. So C is usually a little above, by ``Σ_{q>c} t_q`` at most.
- Not always: the simulation takes at most ``C + max_e Σ (g − t_q)``, the sum over the last e = 0 … P − 1 stages, with
  ``g = max (t − B) + max (t − F) − max t`` (``overlapped``: ``g = max F + max B − max t``). A path through the schedule
  alternates between F and B of one stage but for at most e forwards at its start and e backwards at its end, if it does
  not reach the last e stages. So C is an upper bound if no stage but the first is shorter than g: without transfers, if
  forward and backward have the same ratio in all stages. It can be below if the longest forward and the longest
  backward are in different stages, or if very short stages follow expensive hops.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..cluster.topology import Channel
from ..profile.layer_costs import LayerCosts

__all__ = ["Pipeline", "PipelineCost", "Slot", "Split", "evaluate"]


@dataclass(frozen=True, eq=False)
class Slot:
    """A tensor-parallel group that can run one stage."""

    name: str
    """For messages."""
    costs: LayerCosts
    """Of each block in this slot."""
    memory_bytes: float
    """Memory that may be used, per device."""

    @property
    def kind(self) -> tuple[LayerCosts, float]:
        """The costs object and the memory: slots with equal values are interchangeable, except for their channels.

        It can be a dictionary key, because ``LayerCosts`` objects are compared by identity.
        """
        return self.costs, self.memory_bytes


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What is to be divided: as many stages as slots, each with at least one block."""

    slots: tuple[Slot, ...]
    channels: tuple[tuple[Channel, ...], ...]
    """``[slots][slots]``: how one sends to another; the diagonal is not used."""
    micro_batches: int
    """K, per iteration."""

    @property
    def blocks(self) -> int:
        """Of the model."""
        return len(self.slots[0].costs.forward_seconds)


@dataclass(frozen=True)
class Split:
    """Which slot runs which blocks: stage s runs blocks ``[bounds[s], bounds[s + 1])`` in slot ``order[s]``."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def blocks_per_stage(self) -> tuple[int, ...]:
        """How many blocks each stage has."""
        return tuple(stop - start for start, stop in itertools.pairwise(self.bounds))


@dataclass(frozen=True)
class PipelineCost:
    """What a split costs, by stage; the closed form of AutoHet, Eq. 1, without synchronization."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    """Per micro-batch in steady state: one way over each of the two cuts."""
    hop_seconds: tuple[float, ...]
    """One way over the cut behind each stage but the last."""
    update_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    fits: bool
    seconds: float
    """``Σ t + (K − 1)·max t`` with ``t`` forward, backward and transfer, plus the longest update."""

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """t: forward, backward and transfer per micro-batch."""
        parts = zip(self.forward_seconds, self.backward_seconds, self.transfer_seconds, strict=True)
        return tuple(forward + backward + transfer for forward, backward, transfer in parts)


def evaluate(pipeline: Pipeline, split: Split) -> PipelineCost:
    """What ``split`` costs; see Note: closed form.

    A transfer occupies both of its ends (a stage waits until what it sent was taken, as Colossal-AI's schedule does
    with NCCL), activations one way and gradients the other at the same time. So in steady state a stage gives one hop
    to each of its cuts per micro-batch, and ``Σ t`` holds every hop twice: the way there and the way back of one
    micro-batch. Memory: stage s holds the activations of ``min(K, P − s)`` micro-batches.
    """
    forward, backward, update, memory = [], [], [], []
    stages = len(split.order)
    hops = [0.0]
    for s, slot_index in enumerate(split.order):
        slot = pipeline.slots[slot_index]
        costs, totals = slot.costs, slot.costs.cumulative
        start, stop = split.bounds[s], split.bounds[s + 1]
        forward.append(float(totals.forward_seconds[stop] - totals.forward_seconds[start]))
        backward.append(float(totals.backward_seconds[stop] - totals.backward_seconds[start]))
        update.append(float(totals.update_seconds[stop] - totals.update_seconds[start]))
        state = float(totals.state_bytes[stop] - totals.state_bytes[start])
        in_flight = min(pipeline.micro_batches, stages - s)
        memory.append(state + in_flight * float(totals.activation_bytes[stop] - totals.activation_bytes[start]))
        if s + 1 < stages:
            channel = pipeline.channels[slot_index][split.order[s + 1]]
            hops.append(channel.seconds(float(costs.output_bytes[stop - 1])))
    hops.append(0.0)
    transfer = [before + after for before, after in itertools.pairwise(hops)]
    times = [f + b + t for f, b, t in zip(forward, backward, transfer, strict=True)]
    fits = all(used <= pipeline.slots[index].memory_bytes for used, index in zip(memory, split.order, strict=True))
    return PipelineCost(
        forward_seconds=tuple(forward),
        backward_seconds=tuple(backward),
        transfer_seconds=tuple(transfer),
        hop_seconds=tuple(hops[1:-1]),
        update_seconds=tuple(update),
        memory_bytes=tuple(memory),
        fits=fits,
        seconds=sum(times) + (pipeline.micro_batches - 1) * max(times) + max(update),
    )
