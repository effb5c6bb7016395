"""The search for the best 3D plans: what is tried, in which order, and when it ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from .device_groups import GroupingKind, find_grouping
from .draft import Assembler, Draft, Offer
from .placement import Place
from .tp_groups import Bounds, compositions, divisors

__all__ = ["PlanSearch"]

MAX_TRIED = 48
"""Plans that are looked at of one set of devices, in the order of their bounds."""
MAX_THOROUGH = 5
"""Of the best, and of those with the least bounds: plans for which many orders of stages are tried."""
MAX_DEVICES = 96
"""In all of those plans: of a small cluster there are more."""
MAX_UNLIKE = 16
"""Plans that are looked at whose pipelines are cut alike, on devices that are not."""
MAX_EXCHANGES = 32
"""Exchanges of slots that are tried for a plan."""
WORTH_IDLING = 1.01
"""Groups that leave devices idle are tried if their objective (Eq. 3a) is larger by this factor."""

# [Note: what is tried]
# Symmetric plans: every tensor-parallel degree, micro-batch, number of pipelines and composition of a pipeline is a
# row. All rows get a lower bound at once; they are tried in its order until the next bound is no better than the best
# plan so far. Then with each kind of device alone, so that mixing is never worse than leaving the others idle.
# Then pipelines that are cut alike on unlike devices, such as plain data parallelism over all there are: the slots in
# the order of their power, dealt stage by stage, so that those of a stage are as alike as can be. At last, where nodes
# are not linked alike, slots of the best are exchanged for others as long as that helps.
# Asymmetric plans: for each degree AutoHet's groups (Eq. 3), with and without idle devices, and pipelines of one kind
# each, of as few stages as memory allows or more.


class PlanSearch:
    """One search; :meth:`run` once."""

    def __init__(
        self,
        topology: Topology,
        offers: Sequence[Offer],
        assembler: Assembler,
        symmetric: bool,
        stages: Sequence[int] | None = None,
    ) -> None:
        self.topology = topology
        self.offers = offers
        self.assembler = assembler
        self.symmetric = symmetric
        self.stages = stages
        self.drafts: dict[object, Draft] = {}
        self.least: dict[object, float] = {}
        """Bounds of the symmetric ones among them."""
        self.problems: dict[int, str] = {}
        """By tensor-parallel degree: why a plan with it is none."""
        self.too_large: set[int] = set()
        """Tensor-parallel degrees with which no devices can hold the model."""
        self.best = np.inf

    def run(self, keep: int) -> list[Draft]:
        """The best plans, best first; none if there is none."""
        self._set_up()
        kinds = sorted({kind.device for offer in self.offers for kind in offer.kinds})
        world = len(self.topology.devices)
        for allowed in dict.fromkeys([frozenset(kinds), *(frozenset([kind]) for kind in kinds)]):
            self._try_rows(self._rows_of(allowed), self.best)
            if not self.symmetric:
                self._try_unequal(allowed)
        unlike = self._unlike_rows()
        self._try_unlike([row for row in unlike if row[0] < self.best][:MAX_UNLIKE])
        if self.symmetric:
            self._try_everybody()
            self._try_unlike(
                [row for row in unlike if row[2] * row[3] * self.offers[row[1]].tensor_parallel == world][:1]
            )
        self._reorder()
        self._exchange()
        ranked = sorted(self.drafts.values(), key=lambda draft: draft.seconds)
        return _varied(ranked, keep)

    # Symmetric plans --------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Rows and their bounds."""
        self.bounds = [Bounds(offer.kinds, offer.links.least_seconds) for offer in self.offers]
        fastest = max(channel.bytes_per_second for offer in self.offers for channel in offer.links.channels)
        numbers, groups, seconds = [], [], []
        self._counts: list[NDArray[np.int64]] = []
        known: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._start = []
        total = 0
        for number, (offer, bound) in enumerate(zip(self.offers, self.bounds, strict=True)):
            available = tuple(len(kind.slots) for kind in offer.kinds)
            if available not in known:
                rows = compositions(available, bound.blocks)
                known[available] = rows if self.stages is None else rows[np.isin(rows.sum(axis=1), self.stages)]
            # How many such pipelines there can be.
            most = np.where(known[available] > 0, np.array(available) // np.maximum(known[available], 1), 1 << 40)
            most = most.min(axis=1)
            parts = [(1, known[available][:0])]
            for pipelines in divisors(offer.total_micro_batches):
                fitting = np.flatnonzero(most >= pipelines)
                if not len(fitting):
                    break
                parts.append((pipelines, known[available][fitting]))
            counts = np.concatenate([rows for _, rows in parts])
            copies = np.concatenate([np.full(len(rows), count) for count, rows in parts])
            gradients = float(offer.kinds[0].costs.gradient_bytes.sum())
            summed = 2 * (copies - 1) / copies * gradients / counts.sum(axis=1) / fastest
            self._counts.append(counts)
            self._start.append(total)
            total += len(counts)
            numbers.append(np.full(len(counts), number))
            groups.append(copies)
            seconds.append(bound.seconds(counts, offer.total_micro_batches // copies) + summed)
        self._offer_of, self._pipelines = np.concatenate(numbers), np.concatenate(groups)
        self._seconds = np.concatenate(seconds)
        held = {
            offer.tensor_parallel for offer, each in zip(self.offers, seconds, strict=True) if np.isfinite(each).any()
        }
        self.too_large = {offer.tensor_parallel for offer in self.offers} - held
        self._by_bound = np.argsort(self._seconds, kind="stable")

    def _row(self, row: int) -> tuple[Offer, NDArray[np.int64], int]:
        number = int(self._offer_of[row])
        return self.offers[number], self._counts[number][row - self._start[number]], int(self._pipelines[row])

    def _rows_of(self, allowed: frozenset[str]) -> NDArray[np.int64]:
        """Rows with devices of these kinds only, by bound."""
        usable = np.zeros(len(self._seconds), dtype=bool)
        for number, offer in enumerate(self.offers):
            others = [place for place, kind in enumerate(offer.kinds) if kind.device not in allowed]
            part = slice(self._start[number], self._start[number] + len(self._counts[number]))
            usable[part] = (self._counts[number][:, others] == 0).all(axis=1)
        return self._by_bound[usable[self._by_bound]]

    def _try_rows(self, rows: NDArray[np.int64], best: float) -> None:
        """In the order of their bounds, until none can be better than ``best`` or what is found."""
        for row in rows[:MAX_TRIED]:
            if not self._seconds[row] < best:
                break
            offer, counts, pipelines = self._row(row)
            draft = self._try(offer, [tuple(counts.tolist())] * pipelines, symmetric=True)
            if draft is not None:
                best = min(best, draft.seconds)
                self.least[id(offer), pipelines, tuple(counts.tolist())] = float(self._seconds[row])

    def _try_everybody(self) -> None:
        """The best plan that leaves nobody idle and has a micro-batch for every stage, as training needs today."""
        world = len(self.topology.devices)
        whole = np.zeros(len(self._seconds), dtype=bool)
        for number, offer in enumerate(self.offers):
            part = slice(self._start[number], self._start[number] + len(self._counts[number]))
            stages, pipelines = self._counts[number].sum(axis=1), self._pipelines[part]
            whole[part] = (stages * pipelines * offer.tensor_parallel == world) & (
                stages * pipelines <= offer.total_micro_batches
            )
        self._try_rows(self._by_bound[whole[self._by_bound]], np.inf)

    def _unlike_rows(self) -> list[tuple[float, int, int, int]]:
        """Bound, offer, number of pipelines and of stages, where slots in the order of their power are not all alike in
        a stage; by bound."""
        rows: list[tuple[float, int, int, int]] = []
        for number, (offer, bound) in enumerate(zip(self.offers, self.bounds, strict=True)):
            kinds = np.repeat(np.arange(len(offer.kinds)), [len(kind.slots) for kind in offer.kinds])
            for pipelines in divisors(offer.total_micro_batches):
                if not 1 < pipelines <= len(kinds):
                    continue
                stages, counts = [], []
                for length in range(1, min(len(kinds) // pipelines, bound.blocks) + 1):
                    used = kinds[len(kinds) - pipelines * length :].reshape(length, pipelines)
                    if (self.stages is None or length in self.stages) and (used[:, 0] != used[:, -1]).any():
                        stages.append(length)
                        # No pipeline is weaker than the first, which has the weakest of each stage.
                        counts.append(np.bincount(used[:, 0], minlength=len(offer.kinds)))
                if stages:
                    micro_batches = np.full(len(stages), offer.total_micro_batches // pipelines)
                    seconds = bound.seconds(np.array(counts), micro_batches).tolist()
                    rows += [(each, number, pipelines, length) for each, length in zip(seconds, stages, strict=True)]
        return sorted(row for row in rows if np.isfinite(row[0]))

    def _try_unlike(self, rows: Sequence[tuple[float, int, int, int]]) -> None:
        for least, number, pipelines, stages in rows:
            offer = self.offers[number]
            slots = [(kind, slot) for kind, each in enumerate(offer.kinds) for slot in range(len(each.slots))]
            used = slots[len(slots) - pipelines * stages :]
            key = ("unlike", number, pipelines, stages)
            draft = self.assembler.assemble_places(
                offer, [used[first::pipelines] for first in range(pipelines)], symmetric=True
            )
            if isinstance(draft, Draft):
                self.drafts[key] = draft
                self.least[key] = least
                self.best = min(self.best, draft.seconds)

    # Asymmetric plans -------------------------------------------------------------------------------------

    def _try_unequal(self, allowed: frozenset[str]) -> None:
        """Groups that are not alike, the most promising degrees and micro-batches first."""
        for expected, number in sorted((self._expected(number, allowed), number) for number in range(len(self.offers))):
            if not expected < self.best:
                break
            offer = self.offers[number]
            for groups in self._unequal_groups(number, allowed):
                if len(groups) <= offer.total_micro_batches and self._least_unequal(number, groups) < self.best:
                    self._try(offer, groups, symmetric=False)

    def _available(self, offer: Offer, allowed: frozenset[str]) -> NDArray[np.int64]:
        return np.array([len(kind.slots) if kind.device in allowed else 0 for kind in offer.kinds])

    def _expected(self, number: int, allowed: frozenset[str]) -> float:
        """About what the best takes: all devices busy but for the filling of as many pipelines as memory allows."""
        offer = self.offers[number]
        available = self._available(offer, allowed)
        memory = float(available @ np.array([kind.memory_bytes for kind in offer.kinds]))
        pipelines = min(int(memory / _model_bytes(offer)), offer.total_micro_batches, int(available.sum()))
        if pipelines < 1:
            return np.inf
        power = float((available / self.bounds[number].work_seconds).sum())
        return (offer.total_micro_batches + int(available.sum()) - pipelines) / power

    def _least_unequal(self, number: int, groups: Sequence[tuple[int, ...]]) -> float:
        """What the pipelines together take at least, if they all end at the same moment."""
        counts = np.array(groups)
        power = (counts / self.bounds[number].work_seconds).sum()
        return float(self.offers[number].total_micro_batches / power)

    def _unequal_groups(self, number: int, allowed: frozenset[str]) -> list[list[tuple[int, ...]]]:
        offer, bound = self.offers[number], self.bounds[number]
        available = self._available(offer, allowed).tolist()
        kinds = [
            GroupingKind(1.0 / kind.model_seconds, kind.memory_bytes, count)
            for kind, count in zip(offer.kinds, available, strict=True)
            if count
        ]
        present = [place for place, count in enumerate(available) if count]
        found: list[list[tuple[int, ...]]] = []
        reached = 0.0
        for idle in (False, True) if len(kinds) > 1 else (False,):
            grouping = find_grouping(
                kinds,
                _model_bytes(offer),
                lambda groups: max(1.0, offer.total_micro_batches / groups),
                idle=idle,
                most_members=bound.blocks,
                most_groups=offer.total_micro_batches,
                least=reached * WORTH_IDLING,
            )
            if grouping is not None:
                reached = grouping.objective
                whole = np.zeros((len(grouping.groups), len(available)), dtype=np.int64)
                whole[:, present] = grouping.groups
                found.append([tuple(row) for row in whole.tolist()])
        found += self._pure_groups(bound, available, offer.total_micro_batches)
        distinct: dict[tuple[tuple[int, ...], ...], None] = dict.fromkeys(tuple(sorted(each)) for each in found)
        return [list(each) for each in distinct if self.stages is None or {sum(g) for g in each} <= set(self.stages)]

    def _pure_groups(self, bound: Bounds, available: Sequence[int], total: int) -> list[list[tuple[int, ...]]]:
        """Pipelines of one kind each: as many as memory allows, half as many, a quarter, … of each kind."""
        unit = np.eye(len(available), dtype=np.int64)
        most = []
        for kind, count in enumerate(available):
            lengths = np.arange(1, min(count, bound.blocks) + 1)
            held = lengths[bound.fits(lengths[:, None] * unit[kind], np.full(len(lengths), total))]
            most.append(count // int(held[0]) if len(held) else 0)
        ways = []
        share = 1
        while max(most) // share >= 1:
            groups: list[tuple[int, ...]] = []
            for kind, (count, limit) in enumerate(zip(available, most, strict=True)):
                pipelines = max(limit // share, 1) if limit else 0
                for place in range(pipelines):
                    length = min(count // pipelines + (place < count % pipelines), bound.blocks)
                    groups.append(tuple((length * unit[kind]).tolist()))
            ways.append(groups)
            share *= 2
        return ways

    # Both -------------------------------------------------------------------------------------------------

    def _try(self, offer: Offer, groups: Sequence[tuple[int, ...]], symmetric: bool) -> Draft | None:
        key: object = (id(offer), len(groups), groups[0]) if symmetric else (id(offer), tuple(groups))
        if key not in self.drafts:
            draft = self.assembler.assemble(offer, groups, symmetric=symmetric)
            if isinstance(draft, str):
                self.problems.setdefault(offer.tensor_parallel, draft)
                return None
            self.drafts[key] = draft
            self.best = min(self.best, draft.seconds)
        return self.drafts[key]

    def _reorder(self) -> None:
        """Other orders of the stages for the best plans, and for those that these may improve most."""
        for key in self._promising():
            if not self.least.get(key, 0.0) < self.best:
                continue
            old = self.drafts[key]
            new = self.assembler.assemble_places(old.offer, old.places, symmetric=key in self.least, thorough=True)
            if isinstance(new, Draft) and new.seconds < old.seconds:
                self.drafts[key] = new
                self.best = min(self.best, new.seconds)

    def _promising(self) -> list[object]:
        """The best, and those that may be improved most."""
        most = max(MAX_THOROUGH, MAX_DEVICES // len(self.topology.devices))
        by_time = sorted(self.drafts, key=lambda key: self.drafts[key].seconds)
        alike = [key for key in by_time if key in self.least]
        by_bound = sorted(self.least, key=lambda key: self.least[key])
        # Those that are alike also on their own, so that others in front of them keep none from being improved.
        return list(dict.fromkeys([*by_time[:most], *alike[:most], *by_bound[:most]]))

    def _exchange(self) -> None:
        """Other slots for the best plans, where it matters in which nodes they are."""
        if len(set(self.offers[0].links.node_kind.tolist())) < 2:
            return
        for key in self._promising():
            if key not in self.least or not self.least[key] < self.best:
                continue
            draft = self.drafts[key]
            seen: set[object] = set()
            while (better := self._better_places(draft, seen)) is not None:
                draft = better
            if draft is not self.drafts[key]:
                again = self.assembler.assemble_places(draft.offer, draft.places, symmetric=True, thorough=True)
                if isinstance(again, Draft) and again.seconds < draft.seconds:
                    draft = again
                self.drafts[key] = draft
                self.best = min(self.best, draft.seconds)

    def _better_places(self, draft: Draft, seen: set[object]) -> Draft | None:
        """The first exchange of two slots that makes it quicker; None if none does, or too many were tried."""
        offer = draft.offer

        def make(place: Place) -> tuple[int, int]:
            return place[0], self.topology.devices[offer.kinds[place[0]].slots[place[1]][0]].node

        rows = [[places[slot] for slot in cut.order] for places, cut in zip(draft.places, draft.splits, strict=True)]
        used = {place for row in rows for place in row}
        free: dict[object, Place] = {}
        for kind, each in enumerate(offer.kinds):
            for slot in range(len(each.slots)):
                if (kind, slot) not in used:
                    free.setdefault(make((kind, slot)), (kind, slot))
        for one, other in itertools.combinations([*itertools.chain.from_iterable(rows), *free.values()], 2):
            if make(one) == make(other) or (one not in used and other not in used):
                continue
            swap = {one: other, other: one}
            places = [[swap.get(place, place) for place in row] for row in rows]
            look = tuple(sorted(tuple(make(place) for place in row) for row in places))
            if look in seen:
                continue
            if len(seen) >= MAX_EXCHANGES:
                return None
            seen.add(look)
            found = self.assembler.assemble_places(offer, places, symmetric=True)
            if isinstance(found, Draft) and found.seconds < draft.seconds * (1 - 1e-9):
                return found
        return None


def _varied(ranked: Sequence[Draft], keep: int) -> list[Draft]:
    """The best of each kind of plan (degree, number of pipelines, devices in use), then what is left."""
    chosen: dict[object, Draft] = {}
    for draft in ranked:
        shape = (draft.offer.tensor_parallel, len(draft.groups), *_used(draft))
        chosen.setdefault(shape, draft)
    kept = sorted(chosen.values(), key=lambda draft: draft.seconds)[:keep]
    kept += [draft for draft in ranked if not any(draft is each for each in kept)][: keep - len(kept)]
    return sorted(kept, key=lambda draft: draft.seconds)


def _used(draft: Draft) -> tuple[int, ...]:
    """Slots by kind."""
    return tuple(np.array(draft.groups).sum(axis=0).tolist())


def _model_bytes(offer: Offer) -> float:
    """What the slots of a pipeline hold together at least (AutoHet's MIN_mem)."""
    costs = offer.kinds[0].costs
    return float(costs.state_bytes.sum() + costs.activation_bytes.sum())
