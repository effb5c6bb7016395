"""Search for the best 3D plans: order of the candidates, and end of the search."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..cluster.topology import Topology
from ..cost.draft import Draft, DraftBuilder
from ..cost.placement import Place, SlotPool
from ..cost.ranked_plan import MIN_UNEQUAL_GAIN
from ..cost.tp_groups import SlotKind, by_power
from .equal_rows import EqualRows, Shape, mixed_shapes, shapes
from .exchanges import Exchanges, UnequalMoves
from .few_slots import FewSlots
from .gradient_bounds import GradientBounds
from .pipeline_bounds import PipelineBounds
from .unequal_groups import Groups, UnequalGroups

__all__ = ["PlanSearch", "places_in", "restricted_pools"]


# Restricted pools ----------------------------------------------------------------------------------------------------
#
# Pools with fewer slots or kinds, whose plans are also plans of the whole cluster but often missed among all slots.


MAX_LEFT_OUT = 8
"""Types of nodes, and kinds of devices, that are left out in turn: those with the fewest devices."""
MAX_DEVICES = 16
SIMILAR_SPEEDS = (1.05, 1.3, 4.0)
"""Factors up to the next faster device of a kind that counts as equally fast."""


def restricted_pools(topology: Topology, pools: Sequence[SlotPool], *, whole: bool) -> Iterator[list[SlotPool]]:
    """Pools without each type of node, without each kind of device, and with similar speeds rounded down.

    ``whole`` leaves out none. Nodes of one type have the same devices and links; in clusters of more than
    :data:`MAX_DEVICES` devices only the links count, and no kind is left out.
    """
    is_small = len(topology.devices) <= MAX_DEVICES
    ranks_by_type: dict[object, set[int]] = {}
    ranks_by_kind: dict[str, set[int]] = {}
    for number, node in enumerate(topology.nodes):
        devices = Counter((topology.devices[rank].kind.name, topology.devices[rank].speed) for rank in node.devices)
        look = int(pools[0].links.node_kind[number]), tuple(sorted(devices.items())) if is_small else ()
        ranks_by_type.setdefault(look, set()).update(node.devices)
    for rank, device in enumerate(topology.devices):
        ranks_by_kind.setdefault(device.kind.name, set()).add(rank)
    left_out = dict.fromkeys(
        frozenset(ranks)
        for parts in (ranks_by_type, ranks_by_kind)
        if len(parts) > 1 and (is_small or parts is ranks_by_type)
        for ranks in sorted(parts.values(), key=len)[:MAX_LEFT_OUT]
    )
    for ranks in () if whole else left_out:
        yield _changed(pools, partial(_without, ranks=ranks))
    seen = [[len(pool.kinds) for pool in pools]]
    for factor in SIMILAR_SPEEDS:
        rounded = _changed(pools, partial(_rounded_down, factor=factor))
        if (counts := [len(pool.kinds) for pool in rounded]) not in seen:
            seen.append(counts)
            yield rounded


def places_in(pool: SlotPool, other: SlotPool, rows: Sequence[Sequence[Place]]) -> list[list[Place]]:
    """Places in ``pool`` of slots that are given by their places in ``other``, a restricted pool of it."""
    place_of = {ranks: (kind, slot) for kind, each in enumerate(pool.kinds) for slot, ranks in enumerate(each.slots)}
    return [[place_of[other.kinds[kind].slots[slot]] for kind, slot in row] for row in rows]


def _changed(pools: Sequence[SlotPool], change: Callable[[Sequence[SlotKind]], list[SlotKind]]) -> list[SlotPool]:
    changed = [dataclasses.replace(pool, kinds=tuple(change(pool.kinds))) for pool in pools]
    return [pool for pool in changed if pool.kinds]


def _without(kinds: Sequence[SlotKind], ranks: frozenset[int]) -> list[SlotKind]:
    left = [
        dataclasses.replace(kind, slots=tuple(slot for slot in kind.slots if not ranks.intersection(slot)))
        for kind in kinds
    ]
    return [kind for kind in left if kind.slots]


def _rounded_down(kinds: Sequence[SlotKind], factor: float) -> list[SlotKind]:
    """Kinds, with each run of similar speeds of one device as one kind of the lowest speed."""
    by_device: dict[object, list[SlotKind]] = {}
    for kind in kinds:
        by_device.setdefault((kind.device, kind.tensor_parallel), []).append(kind)
    merged = []
    for same in by_device.values():
        same = sorted(same, key=lambda kind: kind.speed)
        starts = [0, *(i for i, (a, b) in enumerate(pairwise(same), 1) if b.speed > a.speed * factor), len(same)]
        for start, stop in pairwise(starts):
            slots = tuple(sorted(slot for kind in same[start:stop] for slot in kind.slots))
            merged.append(dataclasses.replace(same[start], slots=slots))
    return by_power(merged)


MAX_TRIED = 16
"""Candidates per set of device kinds, in the order of their lower bounds."""
MAX_REORDERED = 5
"""Candidates for which many orders of stages are tried: the fastest, and those with the lowest bounds."""
MAX_REORDERED_DEVICES = 96
"""Devices of all these candidates together: in small clusters more than MAX_REORDERED are taken."""
MAX_MIXED = 16
"""Candidates whose pipelines are cut alike on devices that are not alike."""
STARTED, EXCHANGED, RESTARTED = 1600, 192, 144
"""Shapes with other starts, with exchanges of slots, and with restarts of these, times devices."""
EXCHANGES, RESTARTS = 6400, 192
"""Per shape, times devices."""
MAX_EXCHANGED, MAX_RESTARTED, MAX_EXCHANGES, MAX_RESTARTS = 12, 12, 400, 16
MANY_TYPES, FEW_DEVICES = 6, 12
"""Clusters with so many types of slots, or so few devices, get all this; others less: most exchanges change nothing."""
NEAR_REORDERED, NEAR_REORDERED_QUICKLY = 1.2, 1.1
"""Most times the best time, for candidates of which other orders of stages are tried."""
NEAR_MOVED, NEAR_MOVED_OF_MANY, MANY_DEVICES = 2.0, 1.25, 17
"""Most times the best time, for candidates whose slots are moved: with fewer devices, and with many (it gains less)."""
NEAR_KNOWN = 1.03
"""Instead of these, if a plan is known from another search."""
MAX_OF_PART = 3
"""Best plans of each part of the cluster that are taken over."""
MAX_MOVED, MAX_MOVED_QUICKLY = 8, 4
"""Best plans, of different numbers of pipelines, whose slots are then moved between pipelines."""
MOVES, MAX_MOVES = 3200, 200
"""Per plan, times devices."""
MAX_LOOSENED = 12
"""Best plans of equal replicas that are then cut for themselves."""

# Of pipelines that are cut alike, those of all kinds of devices come first, then those of each kind alone, so that a
# mixed plan is never slower than leaving the other kinds idle. Last, slots of the best of all plans are moved.


class PlanSearch:
    """One search. Call :meth:`run` once."""

    def __init__(
        self,
        topology: Topology,
        pools: Sequence[SlotPool],
        builder: DraftBuilder,
        stages: Sequence[int] | None = None,
        *,
        unequal: bool = True,
        all_devices: bool = False,
        below: float = np.inf,
        all_formations: bool = False,
        quick: bool = False,
    ) -> None:
        self.topology = topology
        self.pools = pools
        self.builder = builder
        self.stages = stages
        self.runnable = builder.runnable
        self.unequal = unequal
        self.all_devices = all_devices
        self.all_formations = all_formations
        self.quick = quick
        self.is_further = below < np.inf
        """True if a plan is known from another search."""
        self.bounds = [PipelineBounds.of_pool(pool) for pool in pools]
        self.rows = EqualRows(pools, self.bounds, stages, runnable=self.runnable, below=below)
        self._sums = [self._min_sums(pool) for pool in pools]
        self._groups: dict[object, list[Groups]] = {}
        """Groups that are not alike; they do not depend on the method, and finding them takes long."""
        self.drafts: dict[object, Draft] = {}
        """Candidates that were built, by what they were built from."""
        self.lower_bounds: dict[object, float] = {}
        """On the seconds of candidates, as far as they are known."""
        self.problems: dict[int, str] = {}
        """Reasons why candidates could not be built, by tensor-parallel degree."""
        self.best_seconds = below
        """Smallest :attr:`.Draft.ranking_seconds` of candidates that may be returned."""

    def run(
        self, keep: int, known: Sequence[Draft] = (), is_enough: Callable[[float], bool] | None = None
    ) -> list[Draft]:
        """Best plans, best first; an empty list if there are none."""
        few = all(each.are_few for each in self._all_of_few())
        for step in self._steps(few):
            step()
            found = self.found()
            if is_enough is not None and found and is_enough(min(draft.seconds for draft in found)):
                break
        for draft in known:
            if draft.ranking_seconds < self.best_seconds:
                self._add("known", draft)
        kept = _diverse(self.found(), keep)
        if not kept and self.all_devices:
            # Only to say which plans there are that leave devices out.
            self.all_devices = False
            self._look_through()
            self._look_through_unequal()
        return kept

    def _steps(self, few: bool) -> list[Callable[[], None]]:
        if few and self.all_formations and self.builder.chooses_cuts:
            return [self._look_through, self._try_all_of_few]
        steps = [self._look_through]
        if not few:
            steps += [self._reorder, self._exchange]
        # Earlier steps do not depend on it, so the best equal replicas are those of a search for equal ones only.
        if self.unequal:
            steps.append(self._look_through_unequal)
        if self.unequal and not few:
            steps += [self._try_restricted, self._reorder, self._loosen, self._move]
        return [*steps, self._try_all_of_few, self._try_uniform]

    def promising_pools(self, most: int) -> list[tuple[float, SlotPool]]:
        """Pools of the fastest plans that are found at first sight, in their order, with the seconds of these."""
        self._look_through()
        fastest: dict[SlotPool, float] = {}
        for draft in self.found():
            fastest.setdefault(draft.pool, draft.ranking_seconds)
        return [(seconds, pool) for pool, seconds in fastest.items()][:most]

    def found(self) -> list[Draft]:
        """All candidates that were built and may be returned, best first."""
        return sorted(
            (draft for draft in self.drafts.values() if self._allowed(draft)), key=lambda draft: draft.ranking_seconds
        )

    @property
    def unequal_below(self) -> float:
        """Seconds below which pipelines that differ are worth trying."""
        return self.best_seconds / MIN_UNEQUAL_GAIN

    def _allowed(self, draft: Draft) -> bool:
        return not self.all_devices or draft.devices == len(self.topology.devices)

    def _add(self, key: object, draft: Draft) -> None:
        self.drafts[key] = draft
        if self._allowed(draft):
            self.best_seconds = min(self.best_seconds, draft.ranking_seconds)

    # The most promising candidates of all kinds -------------------------------------------------------------

    def _look_through(self) -> None:
        world = len(self.topology.devices)
        mixed = mixed_shapes(self.pools, self.bounds, self.stages, runnable=self.runnable, below=self.best_seconds)
        if self.all_devices:
            mixed = [shape for shape in mixed if self._devices(shape) == world]
            self._try_rows(self.rows.of_size(world), self.best_seconds)
            self._try_mixed([shape for shape in mixed if shape.seconds < self.best_seconds][:MAX_MIXED])
            return
        kinds = self._device_kinds()
        alone = [frozenset([kind]) for kind in sorted(kinds)]
        for allowed in dict.fromkeys([kinds, *alone]):
            self._try_rows(self.rows.of_kinds(allowed), self.best_seconds)
        for one in alone if len(alone) > 2 else ():
            self._try_rows(self.rows.of_kinds(kinds - one), self.best_seconds)
        self._try_mixed([shape for shape in mixed if shape.seconds < self.best_seconds][:MAX_MIXED])
        if self.runnable:
            # The best plan may leave slow devices idle, but a run may need all of them.
            self._try_rows(self.rows.of_size(world), np.inf)
            self._try_mixed([shape for shape in mixed if self._devices(shape) == world][:1])

    def _look_through_unequal(self) -> None:
        kinds = self._device_kinds()
        alone = () if self.all_devices else (frozenset([kind]) for kind in sorted(kinds))
        for allowed in dict.fromkeys([kinds, *alone]):
            self._try_unequal(allowed)

    def _device_kinds(self) -> frozenset[str]:
        return frozenset(kind.device for pool in self.pools for kind in pool.kinds)

    def _try_rows(self, rows: NDArray[np.int64], best: float) -> None:
        """Try rows in the order of their bounds until none can be faster than ``best`` and those tried before."""
        for row in rows[:MAX_TRIED]:
            bound = float(self.rows.seconds[row])
            if not bound < best:
                break
            pool, counts, pipelines = self.rows.row(row)
            draft = self._try(pool, [counts] * pipelines, symmetric=True)
            if draft is not None:
                best = min(best, draft.seconds)
                self.lower_bounds[pool, pipelines, counts] = bound

    def _try_mixed(self, chosen: Sequence[Shape]) -> None:
        for shape in chosen:
            bound, number, pipelines, stages = shape
            pool = self.pools[number]
            slots = [(kind, slot) for kind, each in enumerate(pool.kinds) for slot in range(len(each.slots))]
            used = slots[len(slots) - pipelines * stages :]
            places = [used[first::pipelines] for first in range(pipelines)]
            draft = self.builder.build_placed(pool, places, symmetric=True)
            if isinstance(draft, Draft):
                key = ("mixed", number, pipelines, stages)
                self._add(key, draft)
                self.lower_bounds[key] = bound

    def _min_sums(self, pool: SlotPool) -> Callable[[int], float]:
        """Least seconds in which so many pipelines sum their gradients; 0 where that is not known."""
        if self.builder.overlap or not pool.has_one_form:
            return lambda pipelines: 0.0
        gradients = GradientBounds(self.topology, pool)
        most = gradients.slots_in_a_node
        return lambda pipelines: gradients.of_pipelines(pipelines) if pipelines > most else 0.0

    def _try_unequal(self, allowed: frozenset[str]) -> None:
        """Try groups that are not alike, the most promising degrees and micro-batches first."""
        groups_of = [
            UnequalGroups(pool, bound, allowed, sums)
            for pool, bound, sums in zip(self.pools, self.bounds, self._sums, strict=True)
        ]
        for each in sorted(groups_of, key=lambda each: each.expected_seconds):
            if not each.expected_seconds < self.unequal_below:
                break
            if self.all_devices and each.pool.devices < len(self.topology.devices):
                continue
            key = each.pool, allowed
            if key not in self._groups:
                self._groups[key] = each.candidates(self.stages, self.unequal_below, may_be_idle=not self.all_devices)
            for groups in self._groups[key]:
                used = int(np.sum(np.array(groups) @ [kind.tensor_parallel for kind in each.pool.kinds]))
                if self.all_devices and used < len(self.topology.devices):
                    continue
                needed = self.builder.min_micro_batches(each.stages(groups))
                if sum(needed) <= each.pool.total_micro_batches and each.min_seconds(groups) < self.unequal_below:
                    self._try(each.pool, groups, symmetric=False)

    def _try(self, pool: SlotPool, groups: Sequence[tuple[int, ...]], symmetric: bool) -> Draft | None:
        key: object = (pool, len(groups), groups[0]) if symmetric else (pool, tuple(groups))
        if key not in self.drafts:
            draft = self.builder.build(pool, groups, symmetric=symmetric)
            if isinstance(draft, str):
                if pool.has_one_form:
                    self.problems.setdefault(pool.tensor_parallel, draft)
                return None
            self._add(key, draft)
        return self.drafts[key]

    # Better than these --------------------------------------------------------------------------------------

    def _try_restricted(self) -> None:
        """Try the best plans that leave out nodes or kinds of devices, or ignore small differences in speed."""
        pool_of = {pool.links: pool for pool in self.pools}
        for number, pools in enumerate(restricted_pools(self.topology, self.pools, whole=self.all_devices)):
            part = PlanSearch(
                self.topology,
                pools,
                self.builder,
                self.stages,
                all_devices=self.all_devices,
                below=self.best_seconds,
            )
            part._look_through()
            part._look_through_unequal()
            for key in sorted(part.drafts, key=lambda key: part.drafts[key].ranking_seconds)[:MAX_OF_PART]:
                draft = part.drafts[key]
                pool = pool_of[draft.pool.links]
                rows = places_in(pool, draft.pool, draft.rows)
                bounds = [cut.bounds for cut in draft.splits]
                tried = [self.builder.build_cut(pool, rows, bounds, draft.micro_batches)]
                if draft.is_equal:
                    tried.append(self.builder.build_placed(pool, rows, symmetric=True))
                found = [each for each in tried if isinstance(each, Draft)]
                if found:
                    self._add(("part", number, key), min(found, key=lambda each: each.ranking_seconds))

    def _reorder(self) -> None:
        """Try other orders of the stages for the best candidates, and for those with the lowest bounds."""
        near = NEAR_REORDERED_QUICKLY if self.quick else NEAR_REORDERED
        for key in self._promising():
            old = self.drafts[key]
            if not self.lower_bounds.get(key, 0.0) < self.best_seconds:
                continue
            if old.ranking_seconds > near * self.best_seconds:
                continue
            new = self.builder.build_placed(old.pool, old.places, symmetric=old.is_equal, thorough=True)
            if isinstance(new, Draft) and new.seconds < old.seconds:
                self._add(key, new)

    def _promising(self) -> list[object]:
        number = max(MAX_REORDERED, MAX_REORDERED_DEVICES // len(self.topology.devices))
        by_time = sorted(self.drafts, key=lambda key: self.drafts[key].ranking_seconds)
        equal = [key for key in by_time if self.drafts[key].is_equal]
        by_bound = sorted(self.lower_bounds, key=lambda key: self.lower_bounds[key])
        # Those that are cut alike also count on their own, so that faster others do not exclude them.
        return list(dict.fromkeys([*by_time[:number], *equal[:number], *by_bound[:number]]))

    def _exchange(self) -> None:
        devices = len(self.topology.devices)
        types = self._types_of_slots()
        if types == 1:
            return
        effort = 1.0 if devices <= FEW_DEVICES else min(max(types - 1, 2) / (MANY_TYPES - 1), 1.0) ** 2

        def number(times_devices: int, most: int, effort: float = effort) -> int:
            return math.ceil(effort * min(max(times_devices // devices, 1), most))

        exchanges = {pool: Exchanges(self.builder, pool) for pool in self.pools}
        best: dict[tuple[SlotPool, int, int], Draft] = {}
        for draft in self.found():
            if draft.is_equal:
                best.setdefault((draft.pool, len(draft.splits), len(draft.splits[0].order)), draft)
        worth = {
            (self.pools[shape.pool], shape.pipelines, shape.stages): shape.seconds
            for shape in shapes(self.pools, self.bounds, self.stages, runnable=self.runnable)
            if shape.seconds < self.best_seconds and (not self.all_devices or self._devices(shape) == devices)
        }
        for shape in list(worth)[: number(STARTED, STARTED)]:
            pool, pipelines, stages = shape
            found = exchanges[pool].start(pipelines, stages)
            if found is not None and (shape not in best or found.seconds < best[shape].seconds):
                best[shape] = found
        most = number(EXCHANGES, MAX_EXCHANGES)
        by_time = sorted((shape for shape in best if shape in worth), key=lambda shape: best[shape].seconds)
        by_time = by_time[: number(EXCHANGED, MAX_EXCHANGED)]
        for shape in by_time:
            if worth[shape] < self.best_seconds:
                best[shape] = exchanges[shape[0]].improved(best[shape], most)
                self._add(("exchanged", *shape), best[shape])
        if self.quick:
            return
        by_time.sort(key=lambda shape: best[shape].seconds)
        for shape in by_time[: number(RESTARTED, MAX_RESTARTED, effort**2)]:
            if worth[shape] < self.best_seconds:
                times = number(RESTARTS, MAX_RESTARTS, effort**2)
                self._add(("restarted", *shape), exchanges[shape[0]].restarted(best[shape], times, most // 2))

    def _loosen(self) -> None:
        """Try the slots of the best plans that are cut alike, with other cuts and micro-batches in each pipeline."""
        equal = [draft for draft in self.found() if draft.is_equal and len(draft.splits) > 1]
        for number, draft in enumerate(equal[:MAX_LOOSENED]):
            loose = self.builder.build_placed(draft.pool, draft.rows)
            if isinstance(loose, Draft) and loose.seconds < self.unequal_below:
                self._add(("loosened", number), loose)

    def _move(self) -> None:
        devices = len(self.topology.devices)
        if self._types_of_slots() == 1:
            return
        best: dict[tuple[SlotPool, int], Draft] = {}
        for draft in self.found():
            best.setdefault((draft.pool, len(draft.splits)), draft)
        allowed = None if self.stages is None else frozenset(self.stages)
        most = min(max(MOVES // devices, 1), MAX_MOVES)
        near = NEAR_MOVED if devices < MANY_DEVICES else NEAR_MOVED_OF_MANY
        if self.is_further:
            near = NEAR_KNOWN
        chosen = list(best.values())[: MAX_MOVED_QUICKLY if self.quick else MAX_MOVED]
        for number, draft in enumerate(chosen):
            if draft.ranking_seconds > near * self.best_seconds:
                continue
            place = self.pools.index(draft.pool)
            moves = UnequalMoves(self.builder, draft.pool, self.bounds[place], self._sums[place])
            self._add(("moved", number), moves.improved(draft, most, allowed, self.all_devices))

    def _types_of_slots(self) -> int:
        """Number of different slots: of different kinds, or in nodes with different links or sizes."""
        nodes, node_kind = self.topology.nodes, self.pools[0].links.node_kind
        types = set()
        for pool in self.pools:
            for kind in pool.kinds:
                for ranks in kind.slots:
                    node = self.topology.devices[ranks[0]].node
                    types.add((kind.device, kind.speed, int(node_kind[node]), len(nodes[node].devices)))
        return len(types)

    def _devices(self, shape: Shape) -> int:
        """Devices in use; if slots have different forms, the most there can be."""
        pool = self.pools[shape.pool]
        if not pool.has_one_form:
            return len(self.topology.devices)
        return shape.pipelines * shape.stages * pool.tensor_parallel

    def _all_of_few(self) -> list[FewSlots]:
        """All plans of each pool: first those that are cut alike, then the others if they are wanted."""
        devices = len(self.topology.devices) if self.all_devices else 0
        return [
            FewSlots(self.builder, pool, bounds, self.stages, equal=equal, devices=devices)
            for equal in ((True, False) if self.unequal else (True,))
            for pool, bounds in zip(self.pools, self.bounds, strict=True)
        ]

    def _try_all_of_few(self) -> None:
        if self.builder.method not in ("exact", "uniform"):
            return
        for few in self._all_of_few():
            if few.are_few:
                for draft in few.better_than(self.best_seconds if few.equal else self.unequal_below):
                    self._add(("few", len(self.drafts)), draft)

    def _try_uniform(self) -> None:
        """Try plans with equally many layers per stage: they can be faster, because a split ignores gradients."""
        if self.builder.method != "exact":
            return
        uniform = copy.copy(self)
        uniform.builder = DraftBuilder(self.topology, "uniform", overlap=self.builder.overlap, runnable=self.runnable)
        uniform.drafts, uniform.lower_bounds, uniform.problems = {}, {}, {}
        uniform._look_through()
        if self.unequal:
            uniform._look_through_unequal()
        for draft in uniform.found()[:1]:
            if draft.ranking_seconds < self.best_seconds:
                self._add("uniform", draft)


def _diverse(ranked: Sequence[Draft], keep: int) -> list[Draft]:
    """Best plan for each combination of degree, number of pipelines and devices in use, then the best others."""
    chosen: dict[object, Draft] = {}
    for draft in ranked:
        shape = (draft.pool.tensor_parallel, len(draft.groups), *_used(draft))
        chosen.setdefault(shape, draft)
    kept = sorted(chosen.values(), key=lambda draft: draft.ranking_seconds)[:keep]
    kept += [draft for draft in ranked if not any(draft is each for each in kept)][: keep - len(kept)]
    return sorted(kept, key=lambda draft: draft.ranking_seconds)


def _used(draft: Draft) -> tuple[int, ...]:
    return tuple(np.array(draft.groups).sum(axis=0).tolist())
