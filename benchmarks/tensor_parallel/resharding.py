"""Units that are permanently re-sharded, against units that migrate in each iteration.

python -m benchmarks.tensor_parallel.resharding [--slowdown 4] [--rounds 20]
sudo python -m benchmarks.tensor_parallel.resharding --quota 0.25

Rank 1 of 2 computes its products ``slowdown`` times, or with ``--quota`` all of its process runs under a CPU quota. A
first model, in mode ``auto``, decides how many units to move while it settles. Three others follow its plan: two that
migrate in each iteration, of which one is the control, and one that gives the units away for good. A last one gives
them away for good and decides by itself. Models take turns in the same two processes. A ratio is the median over rounds
of a variant's time in the round divided by that of migrating.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.common import MODEL, Variant, print_table, quota_on, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.testing.stragglers import Stragglers

NEVER = 10**9
"""So many iterations are never reached."""
BLOCK = 4
"""Iterations of a variant in a round."""


def ratios(variant: Variant, base: Variant) -> list[float]:
    """By round, the time of ``variant`` relative to ``base``."""
    rounds = range(0, len(base.seconds), BLOCK)
    return [fmean(variant.seconds[i : i + BLOCK]) / fmean(base.seconds[i : i + BLOCK]) for i in rounds]


def sent_bytes(variants: Sequence[Variant]) -> list[int]:
    """The bytes of migrated work that all ranks have sent, by variant. Collective."""
    total = torch.tensor(
        [sum(sent.bytes for sent in variant.plugin.balancer.traffic.sent.values()) for variant in variants]
    )
    dist.all_reduce(total)
    return total.tolist()


def seconds_of_a_move(variant: Variant, repetitions: int = 5) -> float:
    """How long it takes to give the units away, or to take them back: the median of several times."""
    found = []
    for _ in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        with variant.plugin.balancer.ordinary_shards():
            pass
        found.append((time.perf_counter() - start) / 2)
    return median(found)


def main() -> None:
    arguments = read_options(
        __doc__,
        slowdown=4.0,
        quota=float,
        rounds=20,
        warmup=40,
        hidden=MODEL["embed_dim"],
        depth=MODEL["depth"],
        batch=common.BATCH,
    )
    start_ranks(2)
    MODEL.update(embed_dim=arguments.hidden, depth=arguments.depth)
    common.BATCH = arguments.batch
    slow = Stragglers(slowdowns={1: arguments.slowdown}) if arguments.quota is None else None
    free = Variant("no straggler, off", BalanceConfig(mode="off"))
    deciding = Variant("deciding", BalanceConfig(mode="auto", reshard_after=None), slow)
    migrating = BalanceConfig(mode="auto", reshard_after=None, warmup_iterations=NEVER)
    following = [
        Variant("migrating each iteration", migrating, slow),
        Variant("migrating each iteration (control)", migrating, slow),
        Variant("permanently re-sharded", replace(migrating, reshard_after=1), slow),
    ]
    variants = [
        *following,
        Variant("permanently re-sharded, own plan", BalanceConfig(mode="auto", reshard_after=10), slow),
    ]
    for variant in [free, deciding, *variants]:
        variant.build()
    take_turns([free], warmup=4, rounds=5, block=BLOCK)
    with quota_on(1, arguments.quota or 1.0):
        take_turns([deciding, variants[-1]], warmup=arguments.warmup, rounds=0, block=BLOCK)
        for variant in following:
            variant.plugin.balancer.follow(deciding.plugin.balancer.plan)
        take_turns(following, warmup=4, rounds=0, block=BLOCK)
        for variant in variants:
            variant.plugin.balancer.traffic.reset()
        take_turns(variants, warmup=0, rounds=arguments.rounds, block=BLOCK)
        sent = sent_bytes(variants)
        iterations = arguments.rounds * (BLOCK + 1)
        move = seconds_of_a_move(following[-1])
    shares = [variant.plugin.balancer.shares for variant in variants]
    given = [torch.tensor([share.migrated, share.resharded]) for share in shares]
    for pair in given:
        dist.broadcast(pair, src=1)
    if dist.get_rank() != 0:
        return
    rows: list[tuple[object, ...]] = [(free.name, free.median_seconds, "", "", "", "", "")]
    for variant, pair, count in zip(variants, given, sent, strict=True):
        of_round = sorted(ratios(variant, variants[0]))
        middle = f"{of_round[len(of_round) // 4]:.3f} to {of_round[-1 - len(of_round) // 4]:.3f}"
        percentages = [f"{share:.0%}" for share in pair.tolist()]
        mean = f"{count / iterations / 1e6:.1f}"
        rows.append((variant.name, variant.median_seconds, median(of_round), middle, *percentages, mean))
    how = f"Slowdown {arguments.slowdown:g}" if arguments.quota is None else f"CPU quota {arguments.quota:g}"
    columns = ("variant", "iteration [s]", "ratio", "middle half", "migrated", "resharded", "sent / iteration [MB]")
    saved = following[0].median_seconds - following[-1].median_seconds
    pays = f", which is saved in {move / saved:.1f} iterations" if saved > 0 else ""
    print_table(f"{how} on rank 1 of 2", columns, rows, [f"Moving the units once takes {move:.3f} s{pays}."])


if __name__ == "__main__":
    main()
