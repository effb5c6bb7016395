"""Pipelines that differ: which slots each of them gets.

For each tensor-parallel degree and micro-batch, AutoHet's groups (Eq. 3), with and without idle devices, and pipelines
of one kind each, with as few stages as memory allows or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from ..bounds.pipeline_bounds import PipelineBounds
from ..slots.device_groups import MemberKind, find_grouping
from ..slots.placement import SlotPool

__all__ = ["Groups", "UnequalGroups"]

MIN_IDLE_GAIN = 1.01
"""Groups that leave devices idle are tried if their objective (AutoHet, Eq. 3a) is larger by this factor."""

PRECISION = 1e-3
"""By this share groups may be less balanced than the best ones: blocks cannot be divided so finely."""
MIN_SHARE = 0.9
"""Groups are looked for whose stages, if they are balanced, take at most the wanted time divided by this: stages that
are not balanced can be faster."""

MAX_WITHOUT_SUMS = 48
"""Up to so many devices, the groups that would be best without sums of gradients are tried too. With more, that takes
half as long again."""

Groups = list[tuple[int, ...]]
"""Slots by kind of each pipeline, ``[pipelines][kinds]``."""


class UnequalGroups:
    """Groups of the slots of one pool that are of some kinds of devices."""

    def __init__(
        self, pool: SlotPool, bounds: PipelineBounds, allowed: frozenset[str], sums: Callable[[int], float]
    ) -> None:
        """What groups are formed of.

        Args:
            pool: The slots there are.
            bounds: Lower bounds on the times of pipelines of the pool.
            allowed: Kinds of devices.
            sums: Seconds in which so many pipelines sum their gradients at least.
        """
        self.pool = pool
        self.bounds = bounds
        self.sums = sums
        self._available = np.array([len(kind.slots) if kind.device in allowed else 0 for kind in pool.kinds])

    @property
    def expected_seconds(self) -> float:
        """Estimated seconds of the best plan: as many pipelines as memory allows, idle only while they fill."""
        memory = float(self._available @ np.array(self._memory_bytes))
        slots, total = int(self._available.sum()), self.pool.total_micro_batches
        pipelines = min(int(memory / self._model_bytes), total, slots)
        if self.pool.pipelines is not None:
            pipelines = self.pool.pipelines if self.pool.pipelines <= pipelines else 0
        if pipelines < 1:
            return np.inf
        power = float((self._available / self.bounds.work_seconds).sum())
        return (total + slots - pipelines) / power

    @staticmethod
    def stages(groups: Groups) -> list[int]:
        """How many stages each pipeline has."""
        return [sum(group) for group in groups]

    def min_seconds(self, groups: Groups) -> float:
        """A lower bound on the seconds of these pipelines, reached if all end at the same moment."""
        power = (np.array(groups) / self.bounds.work_seconds).sum()
        return float(self.pool.total_micro_batches / power) + self.sums(len(groups))

    def candidates(
        self, stages: Sequence[int] | None, below: float = np.inf, *, may_be_idle: bool = True
    ) -> list[Groups]:
        """Different groups.

        Args:
            stages: Numbers of stages that are allowed; None for all.
            below: Groups of which all plans take longer than this many seconds need not be found.
            may_be_idle: Whether groups that leave slots out are looked for too.
        """
        found = [*self._balanced(below, may_be_idle, self.sums), *self._of_one_kind()]
        if self.pool.devices <= MAX_WITHOUT_SUMS:
            # Sums can take longer than their bound, so a number of pipelines for which it is small can seem too good.
            found += self._balanced(below, may_be_idle, lambda pipelines: 0.0)
        distinct: dict[tuple[tuple[int, ...], ...], None] = dict.fromkeys(tuple(sorted(each)) for each in found)
        return [
            list(each)
            for each in distinct
            if self.pool.allows(len(each)) and (stages is None or {sum(group) for group in each} <= set(stages))
        ]

    def _balanced(self, below: float, may_be_idle: bool, sums: Callable[[int], float]) -> Iterator[Groups]:
        """AutoHet's groups, if they can take less than ``below`` seconds; ``sums`` is what their number costs."""
        pool, available = self.pool, self._available
        present = np.flatnonzero(available)
        kinds = [
            MemberKind(1.0 / pool.kinds[place].model_seconds, self._memory_bytes[place], int(available[place]))
            for place in present
        ]
        # Stages that are balanced take as many seconds as there are micro-batches, divided by the objective.
        reached = MIN_SHARE * pool.total_micro_batches / below
        for idle in (False, True) if may_be_idle and len(kinds) > 1 else (False,):
            grouping = find_grouping(
                kinds,
                self._model_bytes,
                lambda groups: max(1.0, pool.total_micro_batches / groups),
                allow_idle=idle,
                max_members=self.bounds.blocks,
                groups=pool.pipelines,
                max_groups=pool.total_micro_batches,
                above=reached * MIN_IDLE_GAIN if idle else reached,
                precision=PRECISION,
                cost=lambda groups: sums(groups) / pool.total_micro_batches,
            )
            if grouping is not None:
                seconds = pool.total_micro_batches / grouping.objective + sums(len(grouping.groups))
                reached = pool.total_micro_batches / seconds
                whole = np.zeros((len(grouping.groups), len(available)), dtype=np.int64)
                whole[:, present] = grouping.groups
                yield [tuple(row) for row in whole.tolist()]

    def _of_one_kind(self) -> Iterator[Groups]:
        """Pipelines of one kind each: of each kind as many as memory allows, half as many, a quarter, …"""
        bound, total = self.bounds, self.pool.total_micro_batches
        available: list[int] = self._available.tolist()
        unit = np.eye(len(available), dtype=np.int64)
        max_pipelines = []
        for kind, count in enumerate(available):
            lengths = np.arange(1, min(count, bound.blocks) + 1)
            held = lengths[bound.fits(lengths[:, None] * unit[kind], np.full(len(lengths), total))]
            max_pipelines.append(count // int(held[0]) if len(held) else 0)
        share = 1
        while max(max_pipelines) // share >= 1:
            groups: Groups = []
            for kind, (count, limit) in enumerate(zip(available, max_pipelines, strict=True)):
                pipelines = max(limit // share, 1) if limit else 0
                for place in range(pipelines):
                    length = min(count // pipelines + (place < count % pipelines), bound.blocks)
                    groups.append(tuple((length * unit[kind]).tolist()))
            yield groups
            share *= 2

    @property
    def _model_bytes(self) -> float:
        """Bytes that the slots of a pipeline hold together at least (AutoHet's MIN_mem)."""
        costs = self.pool.kinds[0].costs
        return float(costs.state_bytes.sum() + costs.activation_bytes.sum())

    @cached_property
    def _memory_bytes(self) -> list[float]:
        """By kind, the memory of a slot, as if its blocks needed as many bytes as those of the first kind's slots."""
        if self.pool.has_one_form and self.pool.kinds[0].recomputed is None:
            return [kind.memory_bytes for kind in self.pool.kinds]
        return [kind.models_in_memory * self._model_bytes for kind in self.pool.kinds]
