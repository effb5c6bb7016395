"""Time and memory of each block of a model in one kind of slot, also with recomputation or ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Channel


class CumulativeCosts(NamedTuple):
    """Costs of the first n blocks together, arrays ``[blocks + 1]`` for n = 0, 1, …"""

    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    update_seconds: NDArray[np.float64]
    state_bytes: NDArray[np.float64]
    activation_bytes: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayerCosts:
    """Costs of each block in one kind of slot (a tensor-parallel group of devices); arrays ``[blocks]``."""

    forward_seconds: NDArray[np.float64]
    backward_seconds: NDArray[np.float64]
    update_seconds: NDArray[np.float64]
    state_bytes: NDArray[np.float64]  # parameters, gradients and optimizer state, per device
    gradient_bytes: NDArray[np.float64]  # gradients that are summed over replicas once per iteration, per device
    activation_bytes: NDArray[np.float64]  # kept for backward by one micro-batch in flight, per device
    output_bytes: NDArray[np.float64]
    """Sent by one micro-batch over a cut behind the block. The gradient that comes back is as large."""
    temporary_bytes: float = 0.0
    """Needed for a moment beside what is kept, for any blocks: in backward, a block's gradients."""
    bucket_bytes: float = 0.0
    """Copy of the gradients in buckets of DistributedDataParallel, if a device runs all blocks."""

    def memory_for_blocks(self, usable_bytes: float, stages: int) -> float:
        """Bytes of a device's usable memory that are left for state and kept activations.

        Colossal-AI wraps a model in DistributedDataParallel if its pipeline has one stage, even without replicas.
        """
        buckets = self.bucket_bytes if stages == 1 else 0.0
        return max(usable_bytes - self.temporary_bytes - buckets, 0.0)

    def recomputed(self) -> LayerCosts:
        """Costs if backward runs forward again, so that a block keeps only its input (the first one: as much as it
        sends).

        In backward, all activations of one block exist for a moment. If the last block, which has the head, needs more
        for this moment than the others, the rest counts like its activations.
        """
        activations, outputs = self.activation_bytes, self.output_bytes
        kept = np.concatenate([outputs[:1], outputs[:-1]])
        for_a_moment = float(activations[: max(len(activations) - 1, 1)].max())
        kept[-1] += max(float(activations[-1]) - for_a_moment, 0.0)
        return replace(
            self,
            backward_seconds=self.backward_seconds + self.forward_seconds,
            activation_bytes=kept,
            temporary_bytes=self.temporary_bytes + for_a_moment,
        )

    def sharded(self, shards: int, state_factor: float, *, copies: bool) -> LayerCosts:
        """Costs with ZeRO stage 1: a device keeps and updates one of ``shards`` equal parts of the optimizer's state.

        Of ``state_factor`` bytes per byte of parameters, one is the parameters and one their gradients, which stay
        whole; with ``copies``, its part of the parameters is there once more. Reduce-scatter and all-gather together
        send what a ring all-reduce sends (Rajbhandari et al., ZeRO, 2020, section 7.2.1).
        """
        whole = min(state_factor, 2.0)
        return replace(
            self,
            state_bytes=self.state_bytes * (whole + (state_factor - whole + copies) / shards) / state_factor,
            update_seconds=self.update_seconds / shards,
        )

    @cached_property
    def cumulative(self) -> CumulativeCosts:
        """Sums over the first blocks, so that the cost of consecutive blocks is one subtraction."""
        by_block = (getattr(self, name) for name in CumulativeCosts._fields)
        return CumulativeCosts(*(np.concatenate([[0.0], np.cumsum(values)]) for values in by_block))

    def hop_seconds(self, channel: Channel) -> NDArray[np.float64]:
        """Seconds of one transfer over ``channel`` by place of the cut, ``[blocks + 1]``; 0 at both ends."""
        sizes, which = self._outputs
        seconds = np.zeros(len(self.output_bytes) + 1)
        if len(sizes):
            seconds[1:-1] = np.array([channel.seconds(size) for size in sizes])[which]
        return seconds

    @cached_property
    def running_totals(self) -> tuple[list[float], ...]:
        """:attr:`cumulative` as lists, of which one number is read several times as fast."""
        return tuple(values.tolist() for values in self.cumulative)

    @cached_property
    def _outputs(self) -> tuple[list[float], NDArray[np.int64]]:
        """Different message sizes, and the index of each block's size, without the last block."""
        sizes, which = np.unique(self.output_bytes[:-1], return_inverse=True)
        return sizes.tolist(), which


def combined(costs: Sequence[LayerCosts], choose: Callable[..., Any]) -> LayerCosts:
    """What ``choose`` (``np.max``, ``np.min``) takes of several costs, block by block."""
    if len(costs) == 1:
        return costs[0]
    names = [field.name for field in fields(LayerCosts)]
    return LayerCosts(**{name: choose([getattr(each, name) for each in costs], axis=0) for name in names})
