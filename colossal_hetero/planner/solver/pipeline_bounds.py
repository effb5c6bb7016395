"""Lower bounds on the time of pipelines, with which the search leaves out plans that cannot be the best."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cost.placement import SlotPool
from ..cost.ranked_plan import ROUNDING
from ..cost.tp_groups import SlotKind
from ..profile.layer_costs import LayerCosts, combined
from .problem import Problem

# [Note: a lower bound on a pipeline's time] Let w[t, b] be the time of block b on kind t, f any weights of the blocks
# with Σ f = 1, and ρ[t] = min_b w[t, b] / f[b]. A stage of kind t that takes at most m does at most a share m / ρ[t] of
# the work, and holds at most cap[t, m] whole blocks: those that fit in memory beside the activations of one micro-batch
# (with recomputation, the larger one of both forms) and are allowed; fewer if the stage has the first or the last block
# and that one takes longer. So for the longest stage m, Σ n[t]·m / ρ[t] ≥ 1 and Σ n[t]·cap[t, m] ≥ blocks. For each m,
# the sum of the stages' times is smallest if the fast kinds are filled first. It is piecewise linear in m, so the
# minimum of sum + (K − 1)·m is at the smallest possible m, or where the fastest kinds alone do all the work. A stage
# has at least the smallest f. Sending and the schedule take time at a cut, so a stage's blocks take at most m less the
# shortest such time.


@dataclass(frozen=True, eq=False)
class _Form:
    sums: tuple[NDArray[np.float64], ...]
    """Least seconds of 1, 2, … blocks, ``[kinds, blocks]``: any neighbors, the first ones, and the last ones."""
    in_memory: NDArray[np.int64]

    @classmethod
    def of(cls, seconds: NDArray[np.float64], in_memory: Sequence[int]) -> _Form:
        ends = np.concatenate([np.zeros((len(seconds), 1)), np.cumsum(seconds, axis=1)], axis=1)
        windows = np.stack([_min_sums(row) for row in ends])
        return cls((windows, ends[:, 1:], np.cumsum(seconds[:, ::-1], axis=1)), np.array(in_memory))

    def capacities(self, place: int, grid: NDArray[np.float64]) -> NDArray[np.int64]:
        """Most blocks of stages, ``[kinds, levels]``."""
        rows = [np.searchsorted(row, grid, side="right") for row in self.sums[place]]
        return np.minimum(np.stack(rows), self.in_memory[:, None])


def named(counts: Sequence[int]) -> tuple[int, ...]:
    """The kind of each slot, of numbers of slots by kind."""
    return tuple(itertools.chain.from_iterable([kind] * count for kind, count in enumerate(counts)))


class PipelineBounds:
    """Lower bounds on the seconds of pipelines of a pool's slots, see [Note: a lower bound on a pipeline's time]."""

    def __init__(self, pool: SlotPool) -> None:
        self.kinds = pool.kinds
        sent = smallest_message(pool)
        self.transfer_seconds = min(channel.seconds(sent) for channel in pool.links.channels)
        """Shortest possible transfer between stages, one way: over the fastest channel of the pool."""
        seconds = np.maximum(np.array([kind.block_seconds for kind in self.kinds]), 1e-15)
        self.blocks = seconds.shape[1]
        shares = (seconds / seconds.sum(axis=1, keepdims=True)).mean(axis=0)
        self.work_seconds: NDArray[np.float64] = (seconds / shares).min(axis=1)
        """By kind: a slot needs at least ``s`` times this for a share ``s`` of the model's work."""
        self._fastest_first = np.argsort(self.work_seconds, kind="stable")
        self._update = min(float(kind.costs.update_seconds.sum()) for kind in self.kinds)
        held = [self._held(kind.costs, kind.memory_bytes) for kind in self.kinds]
        self._forms = [_Form.of(seconds, [each[0] for each in held])]
        recomputed = [each for kind in self.kinds if (each := kind.recomputed_in_pipeline(2)) is not None]
        if len(recomputed) == len(self.kinds):
            longer = np.array([costs.forward_seconds + costs.backward_seconds for costs, _ in recomputed])
            held_again = [self._held(*each) for each in recomputed]
            self._forms.append(_Form.of(longer, [each[0] for each in held_again]))
            held = [np.maximum(*each) for each in zip(held, held_again, strict=True)]
        self._min_share = float(shares.min())
        self._memory = np.array([[0, *np.cumsum(each)] for each in held])
        """Most blocks in the last n stages, ``[kinds, 1 + blocks]``; the n-th last keeps n micro-batches."""
        self.blocks_per_stage: NDArray[np.int64] = self._memory[:, 1]
        self._known: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        one_stage = [((kind.costs, kind.memory_in_pipeline(1)), kind.recomputed_in_pipeline(1)) for kind in self.kinds]
        self.hold_the_model = np.array(
            [
                any(
                    each.cumulative.state_bytes[-1] + each.cumulative.activation_bytes[-1] <= memory
                    for each, memory in filter(None, forms)
                )
                for forms in one_stage
            ]
        )

    @cached_property
    def _levels(self) -> tuple[NDArray[np.float64], list[NDArray[np.int64]]]:
        """Times of a longest stage, less its transfer, at which stages can hold more blocks, ``[levels]``; and blocks
        of any stage, of one with the first block, and of one with the last block, ``[kinds, levels]`` each."""
        ends = np.unique(np.concatenate([np.ravel(rows) for form in self._forms for rows in form.sums]))
        grid = ends * (1 + 1e-12)
        places = range(len(self._forms[0].sums))
        return ends, [np.max([form.capacities(place, grid) for form in self._forms], axis=0) for place in places]

    def _held(self, costs: LayerCosts, memory_bytes: float) -> NDArray[np.int64]:
        """Most blocks of a stage with 1, 2, … micro-batches in flight, ``[blocks]``."""
        state = np.concatenate([[0.0], np.cumsum(costs.state_bytes)])
        activation = np.concatenate([[0.0], np.cumsum(costs.activation_bytes)])
        needed = _min_sums(state) + np.arange(1, self.blocks + 1)[:, None] * _min_sums(activation)
        return np.asarray((needed <= memory_bytes).sum(axis=1))

    def fits(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True for rows that may hold the model, ``[rows]``: ``counts [rows, kinds]``, ``micro_batches [rows]``.

        The n-th stage from the end keeps n micro-batches in flight. So the stages of a kind keep at least 1, 2, …
        """
        short = np.minimum(counts, micro_batches[:, None])
        kind = np.arange(len(self.kinds))
        blocks = self._memory[kind, short]
        last = self._memory[kind, short] - self._memory[kind, np.maximum(short - 1, 0)]
        fits = (blocks + (counts - short) * last).sum(axis=1) >= self.blocks
        return np.asarray(fits & ((counts.sum(axis=1) > 1) | (counts[:, self.hold_the_model] > 0).any(axis=1)))

    def seconds(self, counts: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> NDArray[np.float64]:
        """Lower bounds, ``[rows]``, for K ``micro_batches`` per pipeline, ``[rows]``; infinite where nothing fits."""
        bound = np.full(len(counts), np.inf)
        held = np.flatnonzero(self.fits(counts, micro_batches))
        if len(held):
            first, further = self.options(counts[held])
            bound[held] = (first + (micro_batches[held] - 1) * further).min(axis=0)
        return bound

    def options(
        self, counts: NDArray[np.int64], most: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of the first micro-batch and of each further one, ``[options, rows]`` both; infinite if nothing fits.

        K micro-batches take at least ``min(first + (K − 1) · further)`` over the options, without regard to memory in
        flight. ``counts`` are slots by kind, ``[rows, kinds]``, from one to as many as blocks in each row. ``most`` are
        the blocks that a stage of each kind may hold, ``[kinds]``; None: all.
        """
        # Kinds come first: sums over them are then several times as fast.
        slots = np.ascontiguousarray(counts.T)
        level = self._min_level(slots, most)
        levels, _ = self._levels
        last = len(levels) - 1
        balanced = 1.0 / ((1.0 / self.work_seconds) @ slots)
        steps = list(self._turns(slots, np.maximum(levels[np.minimum(level, last)], balanced)))
        sums = [self._min_sum(slots, step / self.work_seconds[:, None]) for step in steps]
        stages, hop = slots.sum(axis=0), self.transfer_seconds
        first = np.stack(sums) * (1 - 1e-9) + 2 * (stages - 1) * hop + self._update / stages
        return np.where(level <= last, first, np.inf), np.stack(steps) * (1 - 1e-9) + (stages > 1) * hop

    def may_run(self, pipelines: Mapping[tuple[int, ...], int], micro_batches: int, seconds: float) -> bool:
        """True if pipelines may run all micro-batches in so many seconds: so many of each, by the kinds of their slots
        in ascending order, at most as many slots as blocks."""
        run = 0
        for kinds, number in pipelines.items():
            options = [each for each in self._options_of(kinds) if each[0] <= seconds and each[0] < np.inf]
            rest = [min((seconds - first) / further, micro_batches) for first, further in options]
            most = max((int(each * (1 + ROUNDING) + ROUNDING) + 1 for each in rest), default=0)
            if not most:
                return False
            run += number * most
        return run >= micro_batches

    def _options_of(self, kinds: tuple[int, ...]) -> Sequence[tuple[float, float]]:
        """:meth:`options` of these kinds; also computes those that differ by a slot, needed next."""
        if kinds not in self._known:
            number = len(self.kinds)
            counts, unit = np.bincount(kinds, minlength=number), np.eye(number + 1, number, dtype=np.int64)
            near = (counts + unit[:, None] - unit[None, :]).reshape(-1, number)
            near = near[(near >= 0).all(axis=1) & (near.sum(axis=1) >= 1) & (near.sum(axis=1) <= self.blocks)]
            first, further = self.options(near)
            for row, each in enumerate(near.tolist()):
                self._known[named(each)] = list(zip(first[:, row].tolist(), further[:, row].tolist(), strict=True))
        return self._known[kinds]

    def _turns(self, slots: NDArray[np.int64], longest: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
        """Longest stages, ``[rows]`` each: ``longest``, and those with which the fastest kinds alone do all work."""
        yield longest
        order = self._fastest_first
        ordered, power = slots[order], (slots / self.work_seconds[:, None])[order]
        rest = 1.0 - self._min_share * (ordered.sum(axis=0) - np.cumsum(ordered, axis=0))
        summed = np.cumsum(power, axis=0)
        for kind in range(len(order) - 1):
            turn = np.divide(rest[kind], summed[kind], out=longest.copy(), where=summed[kind] > 0)
            yield np.maximum(longest, turn)

    def _min_sum(self, slots: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """Smallest sum of the stages' times, ``[rows]``, if each has at most a share of the work, ``[kinds, rows]``."""
        least = slots * self._min_share
        total, left = self.work_seconds @ least, 1.0 - least.sum(axis=0)
        for kind in self._fastest_first:
            part = np.minimum(np.maximum(slots[kind] * (shares[kind] - self._min_share), 0.0), left)
            total += part * self.work_seconds[kind]
            left -= part
        return np.asarray(total)

    def _min_level(self, slots: NDArray[np.int64], most: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Index of the level, by row, of the shortest longest stage that holds all blocks; else their number."""
        each = self.blocks_per_stage if most is None else np.minimum(self.blocks_per_stage, most)
        capacities, heads, tails = (np.minimum(table, each[:, None]) for table in self._levels[1])
        headless, tailless = capacities - heads, capacities - tails
        absent = np.where(slots > 0, 0, self.blocks)

        # Each stage holds a block from some level on.
        first = (capacities < 1).sum(axis=1)[:, None]
        low = np.where(slots > 0, first, 0).max(axis=0) - 1
        high = np.full(slots.shape[1], len(self._levels[0]))
        while (open_ := high - low > 1).any():
            middle = (low + high) // 2
            ends = np.maximum(
                (tailless.take(middle, axis=1) + absent).min(axis=0),
                (headless.take(middle, axis=1) + absent).min(axis=0),
            )
            enough = (slots * capacities.take(middle, axis=1)).sum(axis=0) - ends >= self.blocks
            high = np.where(open_ & enough, middle, high)
            low = np.where(open_ & ~enough, middle, low)
        return high


def smallest_message(pool: SlotPool) -> float:
    """Least bytes that a micro-batch sends over a cut; 0 if the model cannot be cut."""
    if len(pool.kinds[0].costs.output_bytes) < 2:
        return 0.0
    return min(float(kind.costs.output_bytes[:-1].min(initial=np.inf)) for kind in pool.kinds)


def _min_sums(cumulative: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smallest sums of 1, 2, … neighboring values, ``[blocks]``, from cumulative sums ``[blocks + 1]``."""
    blocks = len(cumulative) - 1
    start, size = np.arange(blocks)[:, None], np.arange(1, blocks + 1)
    stop = start + size
    sums = np.where(stop <= blocks, cumulative[np.minimum(stop, blocks)] - cumulative[start], np.inf)
    return np.asarray(sums.min(axis=0))


def least_kind(one: SlotKind, other: SlotKind) -> SlotKind:
    """The first kind with the least costs of both."""
    again = one.recomputed and other.recomputed and combined((one.recomputed, other.recomputed), np.min)
    return replace(one, costs=combined((one.costs, other.costs), np.min), recomputed=again)


@dataclass(eq=False)
class RelaxedPool:
    """Slots of one degree and micro-batch, by the number of pipelines of a plan.

    Stages that may recompute hold as many blocks as if they did, and take as long as if they did not. With ZeRO stage
    1, a device has the state that it has with at least as many pipelines.
    """

    problem: Problem
    pool: SlotPool
    _by_shards: dict[int, SlotPool] = field(default_factory=dict)

    @property
    def most_pipelines(self) -> int:
        return min(self.pool.slots, self.pool.total_micro_batches)

    def of(self, pipelines: int) -> SlotPool:
        """Slots of plans with at most so many pipelines. Several numbers can return one object."""
        zero = 1 in self.problem.zero_stages
        if not self.problem.recompute and not zero:
            return self.pool
        shards = min(1 << (pipelines - 1).bit_length(), self.most_pipelines) if zero else 1
        if shards not in self._by_shards:
            form, recompute = (self.pool.tensor_parallel, self.pool.micro_batch), self.problem.recompute
            one, divided = (self.problem.pool(*form, recompute=recompute, pipelines=each) for each in (None, shards))
            assert one is not None and divided is not None, "these slots were measured"
            kinds = [least_kind(*both) for both in zip(one.kinds, divided.kinds, strict=True)]
            self._by_shards[shards] = replace(self.pool, kinds=tuple(kinds))
        return self._by_shards[shards]
