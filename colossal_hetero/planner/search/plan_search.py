"""The search for the best 3D plans: which candidates are tried, in which order, and when the search ends."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..plans.runnable import enough_micro_batches
from .device_groups import MemberKind, find_grouping
from .draft import Draft, DraftBuilder
from .few_slots import FewSlots
from .lower_bounds import PipelineBounds
from .placement import Place, SlotPool
from .restricted_pools import places_in, restricted_pools
from .tp_groups import compositions, divisors

__all__ = ["PlanSearch"]

MAX_TRIED = 48
"""Candidates that are tried per set of device kinds, in the order of their lower bounds."""
MAX_REORDERED = 5
"""Candidates for which many orders of stages are tried: so many of the fastest, and of those with the lowest bounds."""
MAX_REORDERED_DEVICES = 96
"""Devices of all these candidates together: in small clusters more candidates than MAX_REORDERED are taken."""
MAX_MIXED = 16
"""Candidates that are tried whose pipelines are cut alike on devices that are not alike."""
MAX_EXCHANGES = 32
"""Exchanges of slots that are tried per candidate."""
MAX_OF_PART = 3
"""Best plans of each part of the cluster that are taken over."""
MIN_IDLE_GAIN = 1.01
"""Groups that leave devices idle are tried if their objective (AutoHet, Eq. 3a) is larger by this factor."""

# [Note: what is tried]
# Plans whose pipelines are cut alike: every combination of tensor-parallel degree, micro-batch, number of pipelines and
# composition of a pipeline is a row. All rows get a lower bound at once. They are tried in the order of their bounds
# until the next bound is not below the best time so far: first with all kinds of devices, then with each kind alone, so
# that a mixed plan is never slower than leaving the other kinds idle. Then pipelines that are cut alike on devices of
# several kinds, such as plain data parallelism over all devices: the slots are sorted by power and given out stage by
# stage, so that the slots of a stage are as similar as possible. Last, if nodes have different links, slots of the best
# candidates are exchanged for others as long as this helps.
# Plans whose pipelines differ: for each degree AutoHet's groups (Eq. 3), with and without idle devices, and pipelines
# of one kind each, with as few stages as memory allows or more.


class PlanSearch:
    """One search. Call :meth:`run` once."""

    def __init__(
        self,
        topology: Topology,
        pools: Sequence[SlotPool],
        builder: DraftBuilder,
        stages: Sequence[int] | None = None,
        *,
        runnable: bool = False,
        all_devices: bool = False,
        below: float = np.inf,
    ) -> None:
        """What is searched.

        Args:
            topology: Machines.
            pools: The slots for each tensor-parallel degree and micro-batch.
            builder: Builds the candidates.
            stages: Numbers of stages that are allowed; None for all.
            runnable: Whether to search only plans that can be run, see :mod:`~colossal_hetero.planner.plans.runnable`.
            all_devices: Whether to return only plans that use every device.
            below: Plans that certainly take this many seconds or longer are not looked for.
        """
        self.topology = topology
        self.pools = pools
        self.builder = builder
        self.stages = stages
        self.runnable = runnable
        self.all_devices = all_devices
        self.drafts: dict[object, Draft] = {}
        """Candidates that were built. The keys are made of what they were built from."""
        self.lower_bounds: dict[object, float] = {}
        """Lower bounds on the seconds of candidates, as far as they are known."""
        self.alike: set[object] = set()
        """Keys of the candidates whose pipelines are cut alike."""
        self.problems: dict[int, str] = {}
        """By tensor-parallel degree: why a candidate could not be built."""
        self.too_large: set[int] = set()
        """Tensor-parallel degrees with which the devices cannot hold the model."""
        self.best_seconds = below
        self._by_bound = np.zeros(0, dtype=np.int64)

    def run(self, keep: int, known: Sequence[Draft] = ()) -> list[Draft]:
        """The best plans, best first; an empty list if there are none.

        Args:
            keep: How many, at most.
            known: Plans of another search of the same pools. The best plan is not slower than these.
        """
        self._look_through()
        if not all(self._all_of(number).are_few for number in range(len(self.pools))):
            self._try_restricted()
        self._reorder()
        self._exchange()
        self._try_all_of_few()
        self._try_uniform()
        for draft in known:
            if draft.seconds < min((each.seconds for each in self.found()), default=np.inf):
                self._add("known", draft)
        return _diverse(self.found(), keep)

    def _look_through(self) -> None:
        """Try the most promising plans of all kinds."""
        if not self._by_bound.size:
            self._set_up()
        kinds = sorted({kind.device for pool in self.pools for kind in pool.kinds})
        world = len(self.topology.devices)
        alone = [frozenset([kind]) for kind in kinds]
        for allowed in dict.fromkeys([frozenset(kinds), *alone]):
            self._try_rows(self._rows_of(allowed), self.best_seconds)
            if not self.runnable:
                self._try_unequal(allowed)
        for one in alone if len(alone) > 2 else ():
            self._try_rows(self._rows_of(frozenset(kinds) - one), self.best_seconds)
        mixed = self._mixed_rows()
        self._try_mixed([row for row in mixed if row[0] < self.best_seconds][:MAX_MIXED])
        if self.runnable:
            self._try_all_devices()
            self._try_mixed([row for row in mixed if row[2] * row[3] * self.pools[row[1]].tensor_parallel == world][:1])

    def _with_uniform_stages(self) -> PlanSearch:
        """The search for better plans with equally many layers per stage. It uses the rows of this search."""
        other = copy.copy(self)
        other.builder = DraftBuilder(self.topology, "uniform")
        other.drafts, other.lower_bounds, other.alike, other.problems = {}, {}, set(), {}
        if self.all_devices:
            other.best_seconds = np.inf
        return other

    def found(self) -> list[Draft]:
        """All candidates that were built and may be returned, best first."""
        world = len(self.topology.devices)
        drafts = [draft for draft in self.drafts.values() if not self.all_devices or draft.devices == world]
        return sorted(drafts, key=lambda draft: draft.seconds)

    # Pipelines that are cut alike ---------------------------------------------------------------------------

    def _set_up(self) -> None:
        """Make the rows and their lower bounds."""
        self.bounds = [PipelineBounds(pool.kinds, pool.links.min_seconds) for pool in self.pools]
        fastest = max(channel.bytes_per_second for pool in self.pools for channel in pool.links.channels)
        numbers, groups, seconds = [], [], []
        self._counts: list[NDArray[np.int64]] = []
        known: dict[object, NDArray[np.int64]] = {}
        self._start = []
        total = 0
        for number, (pool, bound) in enumerate(zip(self.pools, self.bounds, strict=True)):
            available = tuple(len(kind.slots) for kind in pool.kinds)
            # The time of the model decides which kinds are similar. It is nearly in proportion to the micro-batch.
            alike = (available, tuple(kind.device for kind in pool.kinds), tuple(kind.speed for kind in pool.kinds))
            if alike not in known:
                rows = compositions([kind.model_seconds for kind in pool.kinds], available, bound.blocks)
                known[alike] = rows if self.stages is None else rows[np.isin(rows.sum(axis=1), self.stages)]
            rows = known[alike]
            # How many pipelines of this composition the slots suffice for.
            copies_by_kind = np.array(available) // np.maximum(rows, 1)
            max_copies = np.where(rows > 0, copies_by_kind, 1 << 40).min(axis=1)
            parts = [(1, rows[:0])]
            for pipelines in divisors(pool.total_micro_batches):
                fitting = np.flatnonzero(max_copies >= pipelines)
                if not len(fitting):
                    break
                parts.append((pipelines, rows[fitting]))
            counts = np.concatenate([rows for _, rows in parts])
            copies = np.concatenate([np.full(len(rows), count) for count, rows in parts])
            gradients = float(pool.kinds[0].costs.gradient_bytes.sum())
            summed = 2 * (copies - 1) / copies * gradients / counts.sum(axis=1) / fastest
            self._counts.append(counts)
            self._start.append(total)
            total += len(counts)
            numbers.append(np.full(len(counts), number))
            groups.append(copies)
            seconds.append(bound.seconds(counts, pool.total_micro_batches // copies) + summed)
        self._pool_of, self._pipelines = np.concatenate(numbers), np.concatenate(groups)
        self._seconds = np.concatenate(seconds)
        held = {pool.tensor_parallel for pool, each in zip(self.pools, seconds, strict=True) if np.isfinite(each).any()}
        self.too_large = {pool.tensor_parallel for pool in self.pools} - held
        if self.runnable:
            counts_of_stages = np.concatenate([counts.sum(axis=1) for counts in self._counts])
            totals = np.array([pool.total_micro_batches for pool in self.pools])[self._pool_of]
            self._seconds[~enough_micro_batches(counts_of_stages, totals // self._pipelines)] = np.inf
        self._by_bound = np.argsort(self._seconds, kind="stable")

    def _row(self, row: int) -> tuple[SlotPool, NDArray[np.int64], int]:
        number = int(self._pool_of[row])
        return self.pools[number], self._counts[number][row - self._start[number]], int(self._pipelines[row])

    def _rows_of(self, allowed: frozenset[str]) -> NDArray[np.int64]:
        """Rows that use only devices of these kinds, in the order of their bounds."""
        usable = np.zeros(len(self._seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            others = [place for place, kind in enumerate(pool.kinds) if kind.device not in allowed]
            part = slice(self._start[number], self._start[number] + len(self._counts[number]))
            usable[part] = (self._counts[number][:, others] == 0).all(axis=1)
        return self._by_bound[usable[self._by_bound]]

    def _try_rows(self, rows: NDArray[np.int64], best: float) -> None:
        """Try rows in the order of their bounds until none can be faster than ``best`` and those tried before."""
        for row in rows[:MAX_TRIED]:
            if not self._seconds[row] < best:
                break
            pool, counts, pipelines = self._row(row)
            draft = self._try(pool, [tuple(counts.tolist())] * pipelines, symmetric=True)
            if draft is not None:
                best = min(best, draft.seconds)
                key = (pool, pipelines, tuple(counts.tolist()))
                self.lower_bounds[key] = float(self._seconds[row])
                self.alike.add(key)

    def _try_all_devices(self) -> None:
        """Try plans that use every device: the best may leave slow ones idle, but a run may need all of them."""
        world = len(self.topology.devices)
        whole = np.zeros(len(self._seconds), dtype=bool)
        for number, pool in enumerate(self.pools):
            part = slice(self._start[number], self._start[number] + len(self._counts[number]))
            stages = self._counts[number].sum(axis=1)
            whole[part] = stages * self._pipelines[part] * pool.tensor_parallel == world
        self._try_rows(self._by_bound[whole[self._by_bound]], np.inf)

    def _mixed_rows(self) -> list[tuple[float, int, int, int]]:
        """Pipelines that are cut alike and have slots of several kinds in a stage, in the order of their bounds.

        The slots are sorted by power and given out stage by stage. Each row has the lower bound, the number of the
        pool, the number of pipelines and the number of stages.
        """
        rows: list[tuple[float, int, int, int]] = []
        for number, (pool, bound) in enumerate(zip(self.pools, self.bounds, strict=True)):
            kinds = np.repeat(np.arange(len(pool.kinds)), [len(kind.slots) for kind in pool.kinds])
            for pipelines in divisors(pool.total_micro_batches):
                if not 1 < pipelines <= len(kinds):
                    continue
                stages, counts = [], []
                for length in range(1, min(len(kinds) // pipelines, bound.blocks) + 1):
                    used = kinds[len(kinds) - pipelines * length :].reshape(length, pipelines)
                    allowed = self.stages is None or length in self.stages
                    if self.runnable:
                        allowed = allowed and enough_micro_batches(length, pool.total_micro_batches // pipelines)
                    if allowed and (used[:, 0] != used[:, -1]).any():
                        stages.append(length)
                        # The first pipeline has the weakest slot of each stage, so no pipeline is slower.
                        counts.append(np.bincount(used[:, 0], minlength=len(pool.kinds)))
                if stages:
                    micro_batches = np.full(len(stages), pool.total_micro_batches // pipelines)
                    seconds = bound.seconds(np.array(counts), micro_batches).tolist()
                    rows += [(each, number, pipelines, length) for each, length in zip(seconds, stages, strict=True)]
        return sorted(row for row in rows if np.isfinite(row[0]))

    def _try_mixed(self, rows: Sequence[tuple[float, int, int, int]]) -> None:
        for bound, number, pipelines, stages in rows:
            pool = self.pools[number]
            slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
            used = slots[len(slots) - pipelines * stages :]
            key = ("mixed", number, pipelines, stages)
            draft = self.builder.build_placed(
                pool, [used[first::pipelines] for first in range(pipelines)], symmetric=True
            )
            if isinstance(draft, Draft):
                self._add(key, draft)
                self.lower_bounds[key] = bound
                self.alike.add(key)

    # Pipelines that differ ----------------------------------------------------------------------------------

    def _try_unequal(self, allowed: frozenset[str]) -> None:
        """Try groups that are not alike, the most promising degrees and micro-batches first."""
        for expected, number in sorted((self._expected_seconds(n, allowed), n) for n in range(len(self.pools))):
            if not expected < self.best_seconds:
                break
            pool = self.pools[number]
            for groups in self._unequal_groups(number, allowed):
                if len(groups) > pool.total_micro_batches:
                    continue
                if self._min_unequal_seconds(number, groups) < self.best_seconds:
                    self._try(pool, groups, symmetric=False)

    def _available(self, pool: SlotPool, allowed: frozenset[str]) -> NDArray[np.int64]:
        return np.array([len(kind.slots) if kind.device in allowed else 0 for kind in pool.kinds])

    def _expected_seconds(self, number: int, allowed: frozenset[str]) -> float:
        """Estimated seconds of the best plan: as many pipelines as memory allows, idle only while they fill."""
        pool = self.pools[number]
        available = self._available(pool, allowed)
        memory = float(available @ np.array([kind.memory_bytes for kind in pool.kinds]))
        pipelines = min(int(memory / _model_bytes(pool)), pool.total_micro_batches, int(available.sum()))
        if pipelines < 1:
            return np.inf
        power = float((available / self.bounds[number].work_seconds).sum())
        return (pool.total_micro_batches + int(available.sum()) - pipelines) / power

    def _min_unequal_seconds(self, number: int, groups: Sequence[tuple[int, ...]]) -> float:
        """A lower bound on the seconds of these pipelines, reached if all end at the same moment."""
        counts = np.array(groups)
        power = (counts / self.bounds[number].work_seconds).sum()
        return float(self.pools[number].total_micro_batches / power)

    def _unequal_groups(self, number: int, allowed: frozenset[str]) -> list[list[tuple[int, ...]]]:
        pool, bound = self.pools[number], self.bounds[number]
        available = self._available(pool, allowed).tolist()
        kinds = [
            MemberKind(1.0 / kind.model_seconds, kind.memory_bytes, count)
            for kind, count in zip(pool.kinds, available, strict=True)
            if count
        ]
        present = [place for place, count in enumerate(available) if count]
        found: list[list[tuple[int, ...]]] = []
        reached = 0.0
        for idle in (False, True) if len(kinds) > 1 else (False,):
            grouping = find_grouping(
                kinds,
                _model_bytes(pool),
                lambda groups: max(1.0, pool.total_micro_batches / groups),
                allow_idle=idle,
                max_members=bound.blocks,
                max_groups=pool.total_micro_batches,
                above=reached * MIN_IDLE_GAIN,
            )
            if grouping is not None:
                reached = grouping.objective
                whole = np.zeros((len(grouping.groups), len(available)), dtype=np.int64)
                whole[:, present] = grouping.groups
                found.append([tuple(row) for row in whole.tolist()])
        found += self._pure_groups(bound, available, pool.total_micro_batches)
        distinct: dict[tuple[tuple[int, ...], ...], None] = dict.fromkeys(tuple(sorted(each)) for each in found)
        return [list(each) for each in distinct if self.stages is None or {sum(g) for g in each} <= set(self.stages)]

    def _pure_groups(self, bound: PipelineBounds, available: Sequence[int], total: int) -> list[list[tuple[int, ...]]]:
        """Pipelines of one kind each: of each kind as many as memory allows, half as many, a quarter, …"""
        unit = np.eye(len(available), dtype=np.int64)
        max_pipelines = []
        for kind, count in enumerate(available):
            lengths = np.arange(1, min(count, bound.blocks) + 1)
            held = lengths[bound.fits(lengths[:, None] * unit[kind], np.full(len(lengths), total))]
            max_pipelines.append(count // int(held[0]) if len(held) else 0)
        choices = []
        share = 1
        while max(max_pipelines) // share >= 1:
            groups: list[tuple[int, ...]] = []
            for kind, (count, limit) in enumerate(zip(available, max_pipelines, strict=True)):
                pipelines = max(limit // share, 1) if limit else 0
                for place in range(pipelines):
                    length = min(count // pipelines + (place < count % pipelines), bound.blocks)
                    groups.append(tuple((length * unit[kind]).tolist()))
            choices.append(groups)
            share *= 2
        return choices

    # All candidates -----------------------------------------------------------------------------------------

    def _try(self, pool: SlotPool, groups: Sequence[tuple[int, ...]], symmetric: bool) -> Draft | None:
        key: object = (pool, len(groups), groups[0]) if symmetric else (pool, tuple(groups))
        if key not in self.drafts:
            draft = self.builder.build(pool, groups, symmetric=symmetric)
            if isinstance(draft, str):
                self.problems.setdefault(pool.tensor_parallel, draft)
                return None
            self._add(key, draft)
        return self.drafts[key]

    def _reorder(self) -> None:
        """Try other orders of the stages for the best candidates, and for those with the lowest bounds."""
        for key in self._promising():
            if not self.lower_bounds.get(key, 0.0) < self.best_seconds:
                continue
            old = self.drafts[key]
            new = self.builder.build_placed(old.pool, old.places, symmetric=key in self.alike, thorough=True)
            if isinstance(new, Draft) and new.seconds < old.seconds:
                self._add(key, new)

    def _part(self, pools: Sequence[SlotPool]) -> PlanSearch:
        """The search for better plans of these pools."""
        return PlanSearch(
            self.topology,
            pools,
            self.builder,
            self.stages,
            runnable=self.runnable,
            all_devices=self.all_devices,
            below=np.inf if self.all_devices else self.best_seconds,
        )

    def _try_restricted(self) -> None:
        """Try the best plans that leave out nodes or kinds of devices, or ignore small differences in speed."""
        pool_of = {(pool.tensor_parallel, pool.micro_batch): pool for pool in self.pools}
        for number, pools in enumerate(restricted_pools(self.topology, self.pools)):
            part = self._part(pools)
            part._look_through()
            for key in sorted(part.drafts, key=lambda key: part.drafts[key].seconds)[:MAX_OF_PART]:
                draft, equal = part.drafts[key], key in part.alike
                pool = pool_of[draft.pool.tensor_parallel, draft.pool.micro_batch]
                rows = places_in(pool, draft.pool, draft.rows)
                bounds = [cut.bounds for cut in draft.splits]
                tried = [self.builder.build_cut(pool, rows, bounds, draft.micro_batches)]
                if equal:
                    tried.append(self.builder.build_placed(pool, rows, symmetric=True))
                found = [each for each in tried if isinstance(each, Draft)]
                if found:
                    better = min(found, key=lambda each: each.seconds)
                    self._add(("part", number, key), better)
                    if equal:
                        self.alike.add(("part", number, key))

    def _try_uniform(self) -> None:
        """Try plans with equally many layers per stage: they can be faster, because a split ignores gradients."""
        if self.builder.method != "exact":
            return
        for draft in self._with_uniform_stages().run(1):
            if draft.seconds < self.best_seconds or self.all_devices:
                self._add("uniform", draft)

    def _all_of(self, number: int) -> FewSlots:
        devices = len(self.topology.devices) if self.all_devices else 0
        return FewSlots(
            self.builder, self.pools[number], self.bounds[number], self.stages, equal=self.runnable, devices=devices
        )

    def _try_all_of_few(self) -> None:
        """Try all plans of pools with few slots."""
        if self.builder.method not in ("exact", "uniform"):
            return
        for number in range(len(self.pools)):
            few = self._all_of(number)
            if few.are_few:
                best = min((draft.seconds for draft in self.found()), default=np.inf)
                for draft in few.better_than(best if self.all_devices else min(best, self.best_seconds)):
                    self._add(("few", number, len(self.drafts)), draft)

    def _add(self, key: object, draft: Draft) -> None:
        self.drafts[key] = draft
        self.best_seconds = min(self.best_seconds, draft.seconds)

    def _promising(self) -> list[object]:
        """Keys of the best candidates, and of those with the lowest bounds."""
        number = max(MAX_REORDERED, MAX_REORDERED_DEVICES // len(self.topology.devices))
        by_time = sorted(self.drafts, key=lambda key: self.drafts[key].seconds)
        alike = [key for key in by_time if key in self.alike]
        by_bound = sorted(self.lower_bounds, key=lambda key: self.lower_bounds[key])
        # Those that are cut alike are also counted on their own, so that faster others do not exclude them.
        return list(dict.fromkeys([*by_time[:number], *alike[:number], *by_bound[:number]]))

    def _exchange(self) -> None:
        """Try other slots for the best candidates, if nodes have different links."""
        if len(set(self.pools[0].links.node_kind.tolist())) < 2:
            return
        for key in self._promising():
            if key not in self.alike or not self.lower_bounds.get(key, 0.0) < self.best_seconds:
                continue
            draft = self.drafts[key]
            seen: set[object] = set()
            while (better := self._better_places(draft, seen)) is not None:
                draft = better
            if draft is not self.drafts[key]:
                again = self.builder.build_placed(draft.pool, draft.places, symmetric=True, thorough=True)
                if isinstance(again, Draft) and again.seconds < draft.seconds:
                    draft = again
                self._add(key, draft)

    def _better_places(self, draft: Draft, seen: set[object]) -> Draft | None:
        """The first exchange of two slots that makes the plan faster; None if there is none, or too many were tried."""
        pool = draft.pool

        def type_of(place: Place) -> tuple[int, int]:
            """Kind and node: slots of one type are interchangeable."""
            return place[0], self.topology.devices[pool.kinds[place[0]].slots[place[1]][0]].node

        rows = draft.rows
        used = {place for row in rows for place in row}
        free: dict[object, Place] = {}
        for kind, each in enumerate(pool.kinds):
            for slot in range(len(each.slots)):
                if (kind, slot) not in used:
                    free.setdefault(type_of((kind, slot)), (kind, slot))
        for one, other in itertools.combinations([*itertools.chain.from_iterable(rows), *free.values()], 2):
            if type_of(one) == type_of(other) or (one not in used and other not in used):
                continue
            swap = {one: other, other: one}
            places = [[swap.get(place, place) for place in row] for row in rows]
            look = tuple(sorted(tuple(type_of(place) for place in row) for row in places))
            if look in seen:
                continue
            if len(seen) >= MAX_EXCHANGES:
                return None
            seen.add(look)
            found = self.builder.build_placed(pool, places, symmetric=True)
            if isinstance(found, Draft) and found.seconds < draft.seconds * (1 - 1e-9):
                return found
        return None


def _diverse(ranked: Sequence[Draft], keep: int) -> list[Draft]:
    """The best plan for each combination of degree, number of pipelines and devices in use, then the best others."""
    chosen: dict[object, Draft] = {}
    for draft in ranked:
        shape = (draft.pool.tensor_parallel, len(draft.groups), *_used(draft))
        chosen.setdefault(shape, draft)
    kept = sorted(chosen.values(), key=lambda draft: draft.seconds)[:keep]
    kept += [draft for draft in ranked if not any(draft is each for each in kept)][: keep - len(kept)]
    return sorted(kept, key=lambda draft: draft.seconds)


def _used(draft: Draft) -> tuple[int, ...]:
    """Number of slots in use, by kind."""
    return tuple(np.array(draft.groups).sum(axis=0).tolist())


def _model_bytes(pool: SlotPool) -> float:
    """Bytes that the slots of a pipeline hold together at least (AutoHet's MIN_mem)."""
    costs = pool.kinds[0].costs
    return float(costs.state_bytes.sum() + costs.activation_bytes.sum())
