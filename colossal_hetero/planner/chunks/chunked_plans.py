"""The best plans of the interleaved and the zero-bubble schedule, from the devices and degrees of 1F1B plans.

A 1F1B plan says which devices form a pipeline and in which order. The blocks are divided anew over the chunks of each
of these pipelines. For the best plans, stages are exchanged as long as that makes the iteration shorter, because where
the first and the last blocks are depends on the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..cluster.topology import Topology
from ..plans.plan import Plan
from ..profile.layer_profile import ModelProfile
from ..schedules.pass_order import Schedule
from .predict_chunked import predict_chunked_plan

__all__ = ["DIVISION_METHODS", "ChunkedPlans"]

DIVISION_METHODS = ("exact", "simulated", "uniform")
"""Methods that plans with chunks can have. The first two mean the same: divisions are compared by simulation."""
MAX_EXCHANGED = 2
"""Best plans of each schedule whose stages are exchanged."""
MAX_EXCHANGES = 24
"""Exchanges that are tried for each of them."""

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""``[replicas][stages][tensor parallel]``."""


class ChunkedPlans:
    """Makes plans of a list of schedules. What cannot be planned is remembered with the reason."""

    def __init__(
        self,
        topology: Topology,
        profile: ModelProfile,
        schedules: Sequence[Schedule],
        model_chunks: Sequence[int],
        method: str,
    ) -> None:
        """What is planned.

        Args:
            topology: Machines.
            profile: Times and sizes of the model's layers.
            schedules: ``interleaved``, ``zbv`` or both.
            model_chunks: Numbers of chunks per stage to try with ``interleaved``.
            method: One of :data:`DIVISION_METHODS`.
        """
        self.topology = topology
        self.profile = profile
        self.method = method
        self.kinds: list[tuple[Schedule, int]] = []
        """Schedules with the number of chunks per stage."""
        for schedule in schedules:
            self.kinds += [(schedule, chunks) for chunks in (model_chunks if schedule == "interleaved" else (2,))]
        self.problems: dict[Schedule, str] = {}
        """By schedule: why a plan could not be made."""
        self.tried = 0

    def plans(self, bases: Sequence[Plan]) -> list[Plan]:
        """The plans with the devices of ``bases``, best first.

        Args:
            bases: 1F1B plans whose replicas are alike.
        """
        found: list[Plan] = []
        for schedule, chunks in self.kinds:
            known: dict[tuple[Ranks, int], Plan | None] = {}
            for base in bases:
                self._try(base, base.rank_order, schedule, chunks, known)
            for plan in _best(known)[:MAX_EXCHANGED]:
                self._exchange(plan, schedule, chunks, known)
            found += _best(known)
        # Of pipelines that differ only in which of several devices that are alike they have, one is enough.
        distinct = {(self._look(plan.rank_order), plan.micro_batch, plan.layers_per_chunk): plan for plan in found}
        return _best(distinct)

    def _try(
        self, base: Plan, ranks: Ranks, schedule: Schedule, chunks: int, known: dict[tuple[Ranks, int], Plan | None]
    ) -> Plan | None:
        key = ranks, base.micro_batch
        if key not in known:
            known[key] = None
            try:
                known[key] = predict_chunked_plan(
                    self.topology,
                    self.profile,
                    ranks,
                    schedule=schedule,
                    chunks=chunks,
                    micro_batch=base.micro_batch,
                    global_batch=base.global_batch,
                    method=self.method,
                )
                self.tried += 1
            except ValueError as error:
                self.problems.setdefault(schedule, str(error))
        return known[key]

    def _exchange(
        self, plan: Plan, schedule: Schedule, chunks: int, known: dict[tuple[Ranks, int], Plan | None]
    ) -> None:
        """Try exchanges of two stages in all replicas; go on from the first one that is faster."""
        left, seen = MAX_EXCHANGES, {self._look(plan.rank_order)}
        better: Plan | None = plan
        while better is not None:
            plan, better = better, None
            for ranks in _exchanged(plan.rank_order):
                look = self._look(ranks)
                if look in seen:
                    continue
                if not left:
                    return
                seen.add(look)
                left -= 1
                tried = self._try(plan, ranks, schedule, chunks, known)
                if tried is not None and tried.iteration_seconds < plan.iteration_seconds * (1 - 1e-9):
                    better = tried
                    break

    def _look(self, ranks: Ranks) -> tuple[object, ...]:
        """Kind and speed of every stage, and which stages share a node: what is alike takes equally long."""
        devices, numbers = self.topology.devices, dict[int, int]()
        return tuple(
            (devices[group[0]].kind, min(devices[rank].speed for rank in group), len(replica), node)
            for replica in ranks
            for group in replica
            for node in [numbers.setdefault(devices[group[0]].node, len(numbers))]
        )


def _best(known: Mapping[Any, Plan | None]) -> list[Plan]:
    return sorted((plan for plan in known.values() if plan is not None), key=lambda plan: plan.iteration_seconds)


def _exchanged(ranks: Ranks) -> Iterator[Ranks]:
    for one, other in itertools.combinations(range(len(ranks[0])), 2):
        places = list(range(len(ranks[0])))
        places[one], places[other] = other, one
        yield tuple(tuple(replica[place] for place in places) for replica in ranks)
