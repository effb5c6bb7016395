"""The best cuts for pipelines whose slots and stage order are given. Unlike a split of one pipeline, they take into
account the slots and links of all pipelines, which may have to be cut alike, and the time of the gradients."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..stages.fixed_order import AllCuts, CutTimes, all_bounds
from ..stages.pipeline import Slot
from .draft import Draft, DraftBuilder
from .gradient_times import divide_micro_batches
from .placement import Place, SlotPool

Rows = tuple[tuple[Place, ...], ...]
"""The slots of each pipeline in the order of the stages."""

MAX_COMBINATIONS = 20_000  # combinations of cuts of unequal pipelines that are compared
MAX_SUMMED = 300
"""Cuts of one arrangement for which the time of the gradients is computed, the shortest pipelines first."""


class PlacedPipelines:
    """Pipelines of one pool. ``sums`` is the least time in which so many pipelines sum their gradients."""

    def __init__(self, builder: DraftBuilder, pool: SlotPool, sums: Callable[[int], float] = lambda _: 0.0) -> None:
        self.builder = builder
        self.pool = pool
        self.sums = sums
        self.blocks = len(pool.kinds[0].costs.forward_seconds)
        self._cuts: dict[int, AllCuts] = {}
        self._cut_times: dict[object, CutTimes] = {}
        on_node: dict[int, list[int]] = {}
        node_of = {place: builder.node(pool, place) for place in pool.places}
        for (kind, _), node in node_of.items():
            on_node.setdefault(node, []).append(kind)
        types = {node: (int(pool.links.node_kind[node]), tuple(kinds)) for node, kinds in on_node.items()}
        numbers = {each: number for number, each in enumerate(dict.fromkeys(types.values()))}
        most = len(on_node)
        self._look_of = {
            place: (node, (place[0] * len(numbers) + numbers[types[node]]) * most) for place, node in node_of.items()
        }
        """By slot: its node, and a number of its kind and of like nodes, to which a node's number can be added."""

    def look(self, rows: Rows) -> object:
        """Key that is equal only for pipelines that differ by slots of a kind in a node, or by nodes that are alike.
        Nodes are numbered as they come up, so pipelines that are alike can have different keys."""
        numbers: dict[int, int] = {}
        number, look_of = numbers.setdefault, self._look_of
        named = [
            tuple([look + number(node, len(numbers)) for node, look in map(look_of.__getitem__, row)]) for row in rows
        ]
        return tuple(sorted(named))

    def best(self, rows: Rows, below: float) -> Draft | None:
        """The best cuts if all pipelines are cut alike; None if there is no plan faster than ``below``."""
        pool, stages = self.pool, len(rows[0])
        count, least = pool.total_micro_batches // len(rows), self.sums(len(rows))
        bounds = all_bounds(self.blocks, stages)
        if bounds is None or not self.builder.chooses_cuts:
            draft = self.builder.build_placed(pool, rows, symmetric=True, in_order=True, below=below, sums=least)
            return draft if isinstance(draft, Draft) and draft.seconds < below else None
        times = self._times(rows)
        if times is None:
            return None
        seconds = np.max([each.seconds(count) for each in dict.fromkeys(times)], axis=0)
        if len(rows) == 1:
            cut = int(seconds.argmin())
            return self._draft(rows, [bounds[cut]], [count]) if seconds[cut] < below else None
        order = np.flatnonzero(seconds + least < below)
        order = order[np.argsort(seconds[order], kind="stable")][:MAX_SUMMED]
        best, chosen, summing = below, -1, self._summing(rows)
        for cut in order.tolist():
            if seconds[cut] + least >= best:
                break
            total = seconds[cut] + summing([bounds[cut]] * len(rows), best - seconds[cut])
            if total < best:
                best, chosen = total, cut
        return None if chosen < 0 else self._draft(rows, [bounds[chosen]] * len(rows), [count] * len(rows))

    def best_unequal(self, rows: Rows, below: float) -> Draft | None:
        """The best cuts and numbers of micro-batches of each pipeline; None if no plan is faster than ``below``. There
        are at least as many micro-batches as stages."""
        times, total, least = self._times(rows), self.pool.total_micro_batches, self.sums(len(rows))
        if times is None:
            return None
        minimum = list(map(len, rows))
        # What a pipeline runs in any case counts as its first micro-batch.
        extra = np.array(minimum) - 1
        total -= int(extra.sum())
        times = [each.after(count) for each, count in zip(times, extra.tolist(), strict=True)]
        all_of = [all_bounds(self.blocks, len(row)) for row in rows]
        kept = [np.flatnonzero((each.max_micro_batches > 0) & (each.fill_seconds < below)) for each in times]
        while np.prod([float(len(each)) for each in kept]) > MAX_COMBINATIONS:
            # Keep the shorter half of the pipeline with the most cuts.
            longest = max(range(len(kept)), key=lambda number: len(kept[number]))
            share = total / len(rows)
            seconds = times[longest].fill_seconds + (share - 1) * times[longest].step_seconds
            by_time = kept[longest][np.argsort(seconds[kept[longest]], kind="stable")]
            kept[longest] = by_time[: len(by_time) // 2]
        if not all(len(each) for each in kept):
            return None
        grid = np.stack([each.ravel() for each in np.meshgrid(*kept, indexing="ij")])
        fill = np.stack([each.fill_seconds[cuts] for each, cuts in zip(times, grid, strict=True)])
        step = np.stack([each.step_seconds[cuts] for each, cuts in zip(times, grid, strict=True)])
        most = np.stack([each.max_micro_batches[cuts] for each, cuts in zip(times, grid, strict=True)])
        # If micro-batches could be divided, all pipelines would end at the same moment.
        steps = np.maximum(step, 1e-15)
        together = (total - len(rows) + (fill / steps).sum(axis=0)) / (1 / steps).sum(axis=0)
        worth = np.maximum(together * (1 - 1e-9), fill.max(axis=0)) + least < below
        grid, fill, step, most = grid[:, worth], fill[:, worth], step[:, worth], most[:, worth]
        seconds = _last_end(fill, step, most, total, below - least)
        best, found, summing = below, None, self._summing(rows)
        for number in np.argsort(seconds, kind="stable")[:MAX_SUMMED].tolist():
            if not seconds[number] + least < best:
                break
            bounds = [each[cut] for each, cut in zip(all_of, grid[:, number].tolist(), strict=True) if each is not None]
            if seconds[number] + summing(bounds, best - seconds[number]) < best:
                ones = [1] * len(rows)
                counts = divide_micro_batches(fill[:, number], step[:, number], total, ones, most[:, number])
                draft = self._draft(rows, bounds, (counts + extra).tolist())
                if draft is not None and draft.seconds < best:
                    best, found = draft.seconds, draft
        return found

    def _times(self, rows: Rows) -> list[CutTimes] | None:
        """Times of each pipeline; None if neighboring stages have no link or there are too many cuts."""
        times = []
        channels = self.pool.links.channels
        for row, hops in zip(rows, self.builder.hops(self.pool, rows), strict=True):
            bounds = all_bounds(self.blocks, len(row))
            if -1 in hops or bounds is None:
                return None
            key = tuple(kind for kind, _ in row), hops
            if key not in self._cut_times:
                slots: list[Slot] = [self.builder.slot(self.pool, (kind,), len(row)) for kind, _ in row]
                cuts = self._cuts.setdefault(len(row), AllCuts(bounds))
                self._cut_times[key] = cuts.times(slots, [channels[number] for number in hops])
            times.append(self._cut_times[key])
        return times

    def _summing(self, rows: Rows) -> Callable[[Sequence[NDArray[np.int64]], float], float]:
        """A function that gives the seconds of sums for cuts, see ``Summing.seconds``; infinite if slots cannot reach
        each other."""
        summing = self.builder.summing(self.pool, rows)

        def seconds(bounds: Sequence[NDArray[np.int64]], below: float) -> float:
            cuts = [tuple(each.tolist()) for each in bounds]
            if self.builder.overlap:
                # What is hidden depends on the passes of each stage, but not on the number of micro-batches.
                draft = self.builder.build_cut(self.pool, rows, cuts, [1] * len(rows))
                return draft.synchronization_seconds if isinstance(draft, Draft) else np.inf
            try:
                return summing.seconds(cuts, below)
            except ValueError:
                return np.inf

        return seconds

    def _draft(self, rows: Rows, bounds: Sequence[NDArray[np.int64]], counts: Sequence[int]) -> Draft | None:
        found = self.builder.build_cut(self.pool, rows, [tuple(each.tolist()) for each in bounds], counts)
        return found if isinstance(found, Draft) else None


def _last_end(
    fill: NDArray[np.float64], step: NDArray[np.float64], most: NDArray[np.int64], total: int, below: float
) -> NDArray[np.float64]:
    """End of the last pipeline if ``total`` micro-batches are divided best, ``[combinations]``; infinite if not
    ``below``. ``fill`` is the time of the first micro-batch and ``step`` that of each further one,
    ``[pipelines, combinations]``, and ``most`` micro-batches fit in memory."""
    steps = np.maximum(step, 1e-15)
    low = fill.max(axis=0)
    high = np.minimum((fill + (total - 1) * steps).max(axis=0), below) * (1 + 1e-12)
    high = np.maximum(high, low)

    def done(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        counts = np.floor((seconds - fill) / steps * (1 + 1e-13) + 1e-9)
        return np.asarray(np.minimum(np.clip(counts, 0, total).astype(np.int64) + 1, most).sum(axis=0))

    reached = done(high) >= total
    at_once = done(low) >= total
    for _ in range(60):
        middle = (low + high) / 2
        enough = done(middle) >= total
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(reached, np.where(at_once, fill.max(axis=0), high), np.inf)
