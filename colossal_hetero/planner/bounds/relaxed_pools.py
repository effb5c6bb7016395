"""Slots for lower bounds in a search space: with its least memory and its least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..slots.placement import SlotPool
from ..slots.search_space import SearchSpace
from ..slots.tp_groups import slot_kinds
from .least_costs import least_costs

__all__ = ["RelaxedPool", "relaxed_pools"]


@dataclass(eq=False)
class RelaxedPool:
    """The slots of one degree and micro-batch, by the number of pipelines of a plan.

    Stages that may recompute hold as many blocks as if they did, and take as long as if they did not. With ZeRO stage 1
    a device has the state that it has with a number of pipelines that is not smaller.
    """

    topology: Topology
    profile: ModelProfile
    pool: SlotPool
    """That of the simple space."""
    space: SearchSpace
    """Without :attr:`~.SearchSpace.mixed_degrees`."""
    _by_shards: dict[int, SlotPool] = field(default_factory=dict)

    @property
    def most_pipelines(self) -> int:
        """How many pipelines plans have at most."""
        return min(self.pool.slots, self.pool.total_micro_batches)

    def of(self, pipelines: int) -> SlotPool:
        """The slots of plans with at most so many pipelines. The same numbers, and some larger ones, return the same
        object."""
        if not self.space.recompute and 1 not in self.space.zero_stages:
            return self.pool
        shards = min(1 << (pipelines - 1).bit_length(), self.most_pipelines) if 1 in self.space.zero_stages else 1
        if shards not in self._by_shards:
            self._by_shards[shards] = self._relaxed(shards)
        return self._by_shards[shards]

    def _relaxed(self, shards: int) -> SlotPool:
        kinds, divided = (
            slot_kinds(
                self.topology,
                self.profile,
                self.pool.tensor_parallel,
                self.pool.micro_batch,
                recompute=self.space.recompute,
                pipelines=each,
            )
            for each in (None, shards)
        )
        least = [
            replace(
                one,
                costs=least_costs(one.costs, other.costs),
                recomputed=one.recomputed and other.recomputed and least_costs(one.recomputed, other.recomputed),
            )
            for one, other in zip(kinds, divided, strict=True)
        ]
        return replace(self.pool, kinds=tuple(least))


def relaxed_pools(
    topology: Topology, profile: ModelProfile, pools: Sequence[SlotPool], space: SearchSpace
) -> list[RelaxedPool]:
    """One for each of the pools, those of the simple space."""
    return [RelaxedPool(topology, profile, pool, space) for pool in pools]
