"""The two timelines that the balancer keeps of a run: one from before the first plan, and the latest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import clock as clocks
from colossal_hetero.testing import Stragglers, inject_stragglers, stragglers
from tests.support.harness import run_ranks
from tests.support.training import boost, ours, scripted, tiny_vit, train

SIZES = dict(embed_dim=48, num_heads=6)


class VirtualTime:
    """The time of a rank. It advances by a millisecond at each reading, and when the rank sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def synchronize(self, group: dist.ProcessGroup | None) -> None:
        """Set the time to the latest of the group's ranks."""
        latest = torch.tensor(self.now, dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        self.now = latest.item()


@contextmanager
def virtual_time() -> Iterator[None]:
    """Use virtual time for clocks and pauses."""
    time = VirtualTime()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    pair = pairs[dist.get_rank() // 2]
    mark, stop = clocks.CpuClock.mark, clocks.CpuClock.stop

    def synchronized_mark(clock: clocks.CpuClock, part: Any, kind: int | None = None, inner: bool = False) -> None:
        if part == "communication":
            time.synchronize(pair)
        mark(clock, part, kind)

    def synchronized_stop(clock: clocks.CpuClock, tag: Any = None) -> None:
        time.synchronize(None)
        stop(clock, tag)

    with (
        patch.object(clocks, "time", time),
        patch.object(stragglers, "time", time),
        patch.multiple(clocks.CpuClock, mark=synchronized_mark, stop=synchronized_stop),
    ):
        yield


def check_kept(options: dict[str, Any], iterations: int) -> tuple[Any, Any] | None:
    with virtual_time():
        run = boost(
            ours(BalanceConfig(mode="resize"), tp_size=2, **options), tiny_vit(**SIZES, depth=options.get("pp_size", 1))
        )
        inject_stragglers(run.model, run.optimizer, Stragglers(slowdowns={1: 12.0}, means="sleep"))
        train(run, iterations, same_batch=True)
    found = run.plugin.balancer.timelines()
    records = run.plugin.balancer.collect()
    assert (found is None) == (records is None) == (dist.get_rank() != 0)
    return None if records is None else (found, records)


@pytest.mark.parametrize("options", [{}, dict(pp_size=2, num_microbatches=3)])
def test_timelines_show_an_iteration_before_balancing_and_one_after(options: dict[str, Any]) -> None:
    world = 2 * options.get("pp_size", 1)
    found, records = run_ranks(world, check_kept, options, 20)[0]
    before, after = found
    first_change = next(record.iteration for record in records if record.plan_changed)
    assert before.iteration <= first_change < after.iteration == 16
    for timeline in found:
        record = records[timeline.iteration]
        pruned = [rank.resized for rank in record.ranks]
        assert any(pruned) == (timeline is after)
        assert len(timeline.ranks) == world
        for segments, rank in zip(timeline.ranks, record.ranks, strict=True):
            totals = dict.fromkeys(("matmul", "block", "other", "communication", "waiting"), 0.0)
            for kind, start, end in segments:
                assert end > start >= 0
                totals[kind] += end - start
            assert totals["matmul"] == pytest.approx(rank.matmul_seconds)
            assert totals["matmul"] + totals["block"] + totals["other"] == pytest.approx(rank.work_seconds)
            assert totals["communication"] + totals["waiting"] == pytest.approx(rank.communication_seconds)
            if timeline is before and rank.rank == 0 and not options:
                # Rank 0 waits for rank 1, which sleeps. Bubbles of a pipeline count as communication.
                assert totals["waiting"] > totals["communication"]
        # All ranks use one clock, so their iterations overlap in the picture instead of following each other.
        assert timeline.seconds < 1.5 * max(rank.work_seconds + rank.communication_seconds for rank in record.ranks)
    for record in records:
        assert all(0 < rank.relative_score <= 1 and 0 < rank.own_score <= 1 for rank in record.ranks)
    # Scores compare times at equal work, so the straggler counts as slow even though it prunes.
    assert records[-1].ranks[1].relative_score < 0.6 < records[-1].ranks[0].relative_score
    assert any(rank.own_score == 1.0 for record in records[1:] for rank in record.ranks)


def check_unmarked() -> Any:
    with scripted():
        run = boost(ours(BalanceConfig(mode="resize"), tp_size=2))
    train(run, 9)
    return run.plugin.balancer.timelines()


def test_a_clock_without_segments_leaves_no_timelines() -> None:
    assert run_ranks(2, check_unmarked) == [None, None]
