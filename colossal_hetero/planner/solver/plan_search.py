"""One search for 1F1B plans: starts (rows that are cut alike, groups that differ), then the neighborhoods of the best.

Of a few slots, all plans are tried. Of pipelines that are cut alike, those of all kinds of devices come first, then
those of each kind alone, so that a mixed plan is never slower than leaving the other kinds idle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..cost.draft import Draft, DraftBuilder
from ..cost.placed_pipelines import PlacedPipelines, Rows
from ..cost.placement import Place, SlotPool
from ..cost.ranked_plan import MIN_GAIN
from ..cost.runnable import enough_micro_batches
from .gradient_bounds import GradientBounds
from .neighbors import Neighborhood
from .pipeline_bounds import PipelineBounds
from .problem import Problem
from .starts import MAX_ROWS, SMALL, EqualRows, expected_seconds, shapes, unequal_groups

MAX_GROUPS = 5
"""Slots up to which all plans are tried: with chunks, five form pipelines of at least 2 stages in 380 ways."""
MAX_LEFT_OUT = 2  # speeds of networks, from the slowest on, whose nodes are left out by turns
STARTED, IMPROVED, NEIGHBORS = 75, 12, 400
"""Shapes of equal pipelines for which starts are made, drafts whose neighborhoods are searched, and neighbors of each
that are tried, for up to :data:`SMALL` devices; fewer, in inverse proportion, for more devices."""
NEAR, NEAR_KNOWN = 1.5, 1.05
"""Most times the best time, for drafts whose neighborhoods are searched; and if a plan is known from other pools."""


class PlanSearch:
    """Search over the slots of some pools, all with or all without recomputation and ZeRO stage 1."""

    def __init__(
        self, problem: Problem, pools: Sequence[SlotPool], builder: DraftBuilder, known: Sequence[Draft] = ()
    ) -> None:
        """``known`` are plans from searches in other pools, best first; their slots are starts, too."""
        below = known[0].ranking_seconds if known else np.inf
        self.problem = problem
        self.topology = problem.topology
        self.pools = pools = [*pools, *_on_faster_networks(problem, pools)]
        self.builder = builder
        plain = pools[0].pipelines is None and pools[0].kinds[0].recomputed is None
        self._factor = 1.0 if plain else MIN_GAIN
        self.all_devices = problem.all_devices
        self.bounds = [PipelineBounds(pool) for pool in pools]
        self.rows = EqualRows(pools, self.bounds, problem.stages, below=below / self._factor)
        self._sums = [self._min_sums(pool) for pool in pools]
        self.drafts: dict[object, Draft] = {}
        self.problems: dict[int, str] = {}  # reasons why candidates could not be built, by tensor-parallel degree
        self.best_ranking = self._known_ranking = below
        self._known = known
        self._neighborhoods: dict[object, Neighborhood] = {}
        self._near = NEAR if below == np.inf else NEAR_KNOWN

    def run(self, is_enough: Callable[[float], bool] | None = None) -> list[Draft]:
        for step in self._steps():
            step()
            found = self.found()
            if is_enough is not None and found and is_enough(min(draft.seconds for draft in found)):
                break
        self._neighborhoods.clear()  # they refer to this search, and without them all is freed at once
        found = self.found()
        if not found and self.all_devices:
            # Only to say which plans there are that leave devices out.
            self.all_devices = False
            self._try_equal()
            self._try_unequal()
        return found

    def _steps(self) -> list[Callable[[], None]]:
        # Earlier steps do not depend on it, so the best equal replicas are those of a search for equal ones only.
        unequal = [self._try_unequal] if self.problem.unequal else []
        if self.builder.chooses_cuts and all(pool.slots <= MAX_GROUPS for pool in self.pools):
            return [self._try_known, self._try_equal, *unequal, self._try_all_of_few]
        moves = [self._move, self._perturb] if self.problem.unequal else [self._perturb]
        return [self._try_known, self._try_equal, self._exchange, *unequal, *moves, self._try_all_of_few]

    def found(self) -> list[Draft]:
        """All candidates that were built and may be returned, best first."""
        return sorted(filter(self._allowed, self.drafts.values()), key=lambda draft: draft.ranking_seconds)

    @property
    def _below(self) -> float:
        """Seconds below which equal pipelines are better than the best plan."""
        return self.best_ranking / self._factor

    @property
    def _unequal_below(self) -> float:
        return self._below / MIN_GAIN

    def _allowed(self, draft: Draft) -> bool:
        return not self.all_devices or draft.devices == len(self.topology.devices)

    def _add(self, key: object, draft: Draft) -> None:
        self.drafts[key] = draft
        if self._allowed(draft):
            self.best_ranking = min(self.best_ranking, draft.ranking_seconds)

    # Starts -------------------------------------------------------------------------------------------------

    def _try_known(self) -> None:
        for number, draft in enumerate(self._known[:MAX_ROWS]):
            for pool in self.pools:
                if pool.micro_batch == draft.pool.micro_batch:
                    self._try_in(pool, draft, ("known", pool, number))

    def _try_in(self, pool: SlotPool, draft: Draft, key: object) -> None:
        """Try the slots of a plan as they are in another pool, if they are in it."""
        slots = [[draft.pool.kinds[kind].slots[slot] for kind, slot in row] for row in draft.rows]
        if pool.allows(len(slots)) and all(ranks in pool.place_of for row in slots for ranks in row):
            rows = [[pool.place_of[ranks] for ranks in row] for row in slots]
            found = self.builder.build_placed(pool, rows, symmetric=draft.is_equal, in_order=True)
            if isinstance(found, Draft):
                self._add(key, found)

    def _try_equal(self) -> None:
        world = len(self.topology.devices)
        if self.all_devices:
            self._try_rows(self.rows.of_size(world), self._below)
            return
        kinds = self._device_kinds()
        alone = [frozenset([kind]) for kind in sorted(kinds)]
        others = [kinds - one for one in alone] if len(alone) > 2 else []
        for allowed in dict.fromkeys([kinds, *alone, *others]):
            self._try_rows(self.rows.of_kinds(allowed), self._below)
        # The best plan may leave slow devices idle, but a run may need all of them.
        self._try_rows(self.rows.of_size(world), np.inf)

    def _try_rows(self, rows: NDArray[np.int64], best: float) -> None:
        """Try rows in the order of their bounds until none can be faster than ``best`` and those tried before."""
        for row in rows:
            if not float(self.rows.seconds[row]) < best:
                break
            pool, counts, pipelines = self.rows.row(row)
            draft = self._try(pool, [counts] * pipelines, symmetric=True)
            if draft is not None:
                best = min(best, draft.seconds)

    def _try_unequal(self) -> None:
        kinds = self._device_kinds()
        alone = [] if self.all_devices or self._near < NEAR else [frozenset([kind]) for kind in sorted(kinds)]
        for allowed in dict.fromkeys([kinds, *alone]):
            self._try_groups(allowed)

    def _try_groups(self, allowed: frozenset[str]) -> None:
        """Try groups that are not alike, the most promising pools first."""
        expected = [(expected_seconds(pool, allowed), number) for number, pool in enumerate(self.pools)]
        for seconds, number in sorted(expected)[:MAX_ROWS]:
            if not seconds < self._unequal_below:
                break
            pool = self.pools[number]
            # Of few slots, near plans are starts, and are shown beside the best one.
            near = self._near if pool.slots <= SMALL else 1.0
            for groups in unequal_groups(
                pool, self.bounds[number], allowed, self.problem.stages, near * self._unequal_below
            ):
                slots = int(np.sum(groups))
                if self.all_devices and slots * pool.tensor_parallel < len(self.topology.devices):
                    continue
                if slots <= pool.total_micro_batches:
                    self._try(pool, groups, symmetric=False)

    def _try(self, pool: SlotPool, groups: Sequence[tuple[int, ...]], symmetric: bool) -> Draft | None:
        key: object = (pool, len(groups), groups[0]) if symmetric else (pool, tuple(groups))
        if key not in self.drafts:
            draft = self.builder.build(pool, groups, symmetric=symmetric)
            if isinstance(draft, str):
                self.problems.setdefault(pool.tensor_parallel, draft)
                return None
            self._add(key, draft)
        return self.drafts[key]

    # Neighborhoods ------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Search the neighborhoods of equal pipelines of the most promising shapes."""
        limit = self._near * self._below
        if self._near < NEAR and not any(draft.is_equal and draft.seconds <= limit for draft in self.found()):
            return
        world, most = len(self.topology.devices), -(-self._limit(IMPROVED) // 4)
        worth = {
            (pool, pipelines, stages): seconds
            for seconds, number, pipelines, stages in shapes(self.pools, self.bounds, self.problem.stages)
            for pool in [self.pools[number]]
            if seconds < self._below and (not self.all_devices or pipelines * stages * pool.tensor_parallel == world)
        }
        for pool, pipelines, stages in list(worth)[: self._limit(STARTED)]:
            starts = self._neighborhood(pool).starts(pipelines, stages, most, self._near * self._below)
            for number, draft in enumerate(starts):
                self._add(("start", pool, pipelines, stages, number), draft)
        equal = [each for each in self.found() if each.is_equal and _shape(each) in worth]
        for starts in _by_form(equal, by_size=False)[: self._limit(IMPROVED)]:
            pool, pipelines, stages = _shape(starts[0])
            for number, start in enumerate(each for each in starts[:most] if each.seconds <= self._near * self._below):
                if worth[_shape(start)] < self._below:
                    draft = self._neighborhood(pool).improved(start, self._limit(NEIGHBORS), equal=True)
                    self._add(("exchanged", pool, pipelines, stages, number), draft)
                    # Neighborhoods hardly depend on the micro-batch: what is found is tried in the other pools.
                    for other in self.pools:
                        if other is not pool and worth.get((other, pipelines, stages), np.inf) < self._below:
                            self._try_in(other, draft, ("exchanged", other, pipelines, stages, number))

    def _move(self) -> None:
        """Search the neighborhoods of the best plans of different numbers of pipelines and slots."""
        for number, draft in enumerate(self._best_of_forms(self._limit(IMPROVED), self._near)):
            better = self._neighborhood(draft.pool).improved(draft, self._limit(NEIGHBORS), equal=False)
            self._add(("moved", number), better)

    def _perturb(self) -> None:
        """Go on from drafts near the best plans, if there is a new one, as long as that leads to a better one."""
        best, done, most = self._known_ranking, set[Draft](), self._limit(IMPROVED)
        starts = most**2 // IMPROVED  # none of 64 devices, whose neighbors take long
        while starts and self.best_ranking < best:
            best = self.best_ranking
            near = self._best_of_forms(-(-most // 4), NEAR_KNOWN)
            for draft in [each for each in near if each not in done]:
                done.add(draft)
                for equal in [True] * draft.is_equal + [False] * self.problem.unequal:
                    perturbed = self._neighborhood(draft.pool).perturbed
                    better = perturbed(draft, self._limit(NEIGHBORS), starts, NEAR_KNOWN, equal=equal)
                    self._add(("perturbed", len(self.drafts)), better)

    def _best_of_forms(self, most: int, near: float) -> list[Draft]:
        best = [alike[0] for alike in _by_form(self.found(), by_size=True)[:most]]
        return [draft for draft in best if draft.ranking_seconds <= near * self.best_ranking]

    def _neighborhood(self, pool: SlotPool) -> Neighborhood:
        # Pools of equally many slots have the same ones.
        key = pool.tensor_parallel, pool.micro_batch, pool.pipelines, pool.slots
        if key not in self._neighborhoods:
            self._neighborhoods[key] = Neighborhood(
                PlacedPipelines(self.builder, pool, self._min_sums(pool)),
                PipelineBounds(pool),
                self.problem.stages,
                all_slots=self.all_devices,
                others=cache(lambda number: self._neighborhood(self.problem.with_pipelines(pool, number))),
            )
        return self._neighborhoods[key]

    def _limit(self, most: int) -> int:
        return max(most * SMALL // max(len(self.topology.devices), SMALL), 2)

    def _try_all_of_few(self) -> None:
        """Try all plans of pools of few slots: first those that are cut alike, then the others if they are wanted."""
        if self.builder.method not in ("exact", "uniform"):
            return
        devices = len(self.topology.devices) if self.all_devices else 0
        for equal in (True, False) if self.problem.unequal else (True,):
            for pool, bounds, sums in zip(self.pools, self.bounds, self._sums, strict=True):
                if pool.slots <= MAX_GROUPS:
                    placed = PlacedPipelines(self.builder, pool, sums)
                    few = FewSlots(placed, bounds, self.problem.stages, equal, devices)
                    for draft in few.better_than(self._below if equal else self._unequal_below):
                        self._add(("few", len(self.drafts)), draft)

    # Pools --------------------------------------------------------------------------------------------------

    def _device_kinds(self) -> frozenset[str]:
        return frozenset(kind.device for pool in self.pools for kind in pool.kinds)

    def _min_sums(self, pool: SlotPool) -> Callable[[int], float]:
        """Least seconds in which so many pipelines sum their gradients; 0 where that is not known."""
        if self.builder.overlap:
            return lambda pipelines: 0.0
        gradients = GradientBounds(self.topology, pool)
        most = gradients.slots_in_a_node
        return lambda pipelines: gradients.of_pipelines(pipelines) if pipelines > most else 0.0


def _on_faster_networks(problem: Problem, pools: Sequence[SlotPool]) -> list[SlotPool]:
    """Pools without the nodes that have the slowest networks: plans of all slots often miss their best plans."""
    nodes, links = problem.topology.nodes, pools[0].links
    fastest = [
        max((channel.bytes_per_second for channel in links.from_kind(int(kind))), default=0.0)
        for kind in links.node_kind
    ]
    found = []
    left_out = 0 if problem.all_devices else MAX_LEFT_OUT
    for least in sorted(set(fastest))[1 : 1 + left_out]:
        fast = {rank for node, rate in zip(nodes, fastest, strict=True) if rate >= least for rank in node.devices}
        for pool in pools:
            slots = [tuple(ranks for ranks in kind.slots if fast.issuperset(ranks)) for kind in pool.kinds]
            kinds = tuple(replace(kind, slots=each) for kind, each in zip(pool.kinds, slots, strict=True) if each)
            if kinds and pool.slots > MAX_GROUPS:
                found.append(replace(pool, kinds=kinds))
    return found


def _shape(draft: Draft) -> tuple[SlotPool, int, int]:
    return draft.pool, len(draft.rows), len(draft.rows[0])


def _by_form(ranked: Sequence[Draft], *, by_size: bool) -> list[list[Draft]]:
    """Drafts by their numbers of pipelines and slots, and by their micro-batch if ``by_size``; each only with those of
    the pool of the best one."""
    forms: dict[object, list[Draft]] = {}
    for draft in ranked:
        pool, slots = draft.pool, sum(map(len, draft.rows))
        size = pool.micro_batch if by_size else None
        alike = forms.setdefault((pool.tensor_parallel, size, pool.pipelines, len(draft.rows), slots), [])
        if not alike or alike[0].pool is pool:
            alike.append(draft)
    return list(forms.values())


@dataclass(eq=False)
class FewSlots:
    """All plans of a pool, at least of so many devices: those that are cut alike, or those that may differ."""

    placed: PlacedPipelines
    bounds: PipelineBounds
    stages: Sequence[int] | None
    equal: bool
    devices: int
    _bound_of: dict[object, float] = field(default_factory=dict)

    def better_than(self, seconds: float) -> list[Draft]:
        """Drafts that are each faster than ``seconds`` and than those before, so the last one is the best of all."""
        found = []
        arrangements = sorted(
            ((self._lower_bound(rows), number, rows) for number, rows in enumerate(self._distinct())),
            key=lambda each: each[:2],
        )
        for bound, _, rows in arrangements:
            if bound >= seconds * (1 - 1e-12):
                break
            draft = self.placed.best(rows, seconds) if self.equal else self.placed.best_unequal(rows, seconds)
            if draft is not None and draft.seconds < seconds:
                found.append(draft)
                seconds = draft.seconds
        return found

    def _distinct(self) -> Iterator[Rows]:
        """Arrangements, without those that differ only by slots of a kind in a node, or by nodes that are alike."""
        seen: set[object] = set()
        for rows in arrangements(self.placed.pool.places):
            if not self._allowed(rows):
                continue
            look = self.placed.look(rows)
            if look not in seen:
                seen.add(look)
                yield rows

    def _allowed(self, rows: Rows) -> bool:
        total, lengths = self.placed.pool.total_micro_batches, {len(row) for row in rows}
        if not self.placed.pool.allows(len(rows)):
            return False
        if sum(map(len, rows)) * self.placed.pool.tensor_parallel < self.devices:
            return False
        if max(lengths) > self.bounds.blocks or len(rows) > total:
            return False
        if self.stages is not None and not lengths <= set(self.stages):
            return False
        if not self.equal:
            return sum(map(len, rows)) <= total
        if len(lengths) > 1 or total % len(rows):
            return False
        return bool(enough_micro_batches(len(rows[0]), total // len(rows)))

    def _lower_bound(self, rows: Rows) -> float:
        counts = np.array(
            [np.bincount([kind for kind, _ in row], minlength=len(self.placed.pool.kinds)) for row in rows]
        )
        if self.equal:
            return max(self._pipeline_bound(row, self.placed.pool.total_micro_batches // len(rows)) for row in counts)
        shortest = max(self._pipeline_bound(row, number) for row, number in zip(counts, map(len, rows), strict=True))
        if shortest == np.inf:
            return np.inf
        power = float((counts / self.bounds.work_seconds).sum())
        return max(shortest, self.placed.pool.total_micro_batches / power * (1 - 1e-9))

    def _pipeline_bound(self, counts: NDArray[np.int64], micro_batches: int) -> float:
        key = counts.tobytes(), micro_batches
        if key not in self._bound_of:
            self._bound_of[key] = float(self.bounds.seconds(counts[None], np.array([micro_batches]))[0])
        return self._bound_of[key]


def arrangements(slots: Sequence[Place], above: tuple[Place, ...] = ()) -> Iterator[Rows]:
    """Pipelines of some of the slots in every order, each of them in ascending order after ``above``."""
    for length in range(1, len(slots) + 1):
        for row in itertools.permutations(slots, length):
            if row <= above:
                continue
            yield (row,)
            left = [slot for slot in slots if slot not in row]
            yield from ((row, *others) for others in arrangements(left, row))
