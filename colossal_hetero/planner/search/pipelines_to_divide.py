"""Pipelines whose blocks can be divided over several chunks per stage."""

from __future__ import annotations

import itertools

from ..candidates.draft import DraftBuilder
from ..chunks.arrangements import MAX_GROUPS, all_arrangements
from ..chunks.chunked_plans import Candidate
from .plan_search import PlanSearch

__all__ = ["pipelines_to_divide"]

MAX_DEVICES = 16
"""Up to so many, each degree and micro-batch has a search of its own for pipelines to divide over chunks."""
MAX_NUMBERS_OF_STAGES = 8
"""Numbers of stages for which pipelines to divide over chunks are searched, the smallest ones."""


def pipelines_to_divide(search: PlanSearch) -> list[Candidate]:
    """Pipelines that are alike, whose blocks can be divided over chunks: all of a few slots, else the best of 1F1B.

    Args:
        search: Has been run.
    """
    world = len(search.topology.devices)
    max_slots = max(pool.slots for pool in search.pools)
    blocks = len(search.pools[0].kinds[0].costs.forward_seconds)
    max_stages = min(max_slots, blocks // 2)
    numbers = [number for number in range(2, max_stages + 1) if search.stages is None or number in search.stages]
    drafts = search.found()
    if max_slots > MAX_GROUPS:
        builder = DraftBuilder(search.topology, "exact")
        parts = [[pool] for pool in search.pools] if world <= MAX_DEVICES else [search.pools]
        for number, pools in itertools.product(numbers[:MAX_NUMBERS_OF_STAGES], parts):
            part = PlanSearch(search.topology, pools, builder, [number], unequal=False, all_devices=search.all_devices)
            part.run(1)
            drafts += part.found()
    candidates: list[Candidate] = []
    for draft in sorted(drafts, key=lambda each: each.seconds):
        if draft.is_equal:
            slots = [tuple(draft.pool.kinds[kind].slots[slot] for kind, slot in row) for row in draft.rows]
            candidates.append((tuple(slots), draft.pool.micro_batch))
    for pool in search.pools:
        if pool.slots <= MAX_GROUPS:
            groups = [ranks for kind in pool.kinds for ranks in kind.slots]
            candidates += [(ranks, pool.micro_batch) for ranks in all_arrangements(groups)]
    devices = world if search.all_devices else 0
    return [
        (ranks, size)
        for ranks, size in candidates
        if len(ranks[0]) in numbers and len(ranks) * len(ranks[0]) * len(ranks[0][0]) >= devices
    ]
