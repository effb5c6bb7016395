"""Balancing a rank under a CPU quota that the program does not know.

sudo python -m benchmarks.tensor_parallel.cpu_quota [--quota 0.25] [--rounds 8]

The quota slows all work of rank 1, not only its products, so balancing cannot make it as fast as the other rank. The
reachable time is computed from the work of each rank, measured without balancing under the same quota. For ``resize``
it is the slow rank's work outside the products plus the least part of its products that it may keep: (1 − γ_max) of its
columns, or of the units of its blocks, but whole units and at least one. For ``auto``, which prunes nothing here, it is
the fixed work of each rank and the optimal division of the work that can be moved. The time of communication without
waiting is added to both. The models take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch.distributed as dist

from benchmarks.common import MODEL, Variant, print_table, quota_on, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.report import IterationRecord, RankRecord, lossless_seconds
from colossal_hetero.layers.workload import kept_count


def main() -> None:
    arguments = read_options(__doc__, quota=0.25, warmup=40, rounds=8, hidden=MODEL["embed_dim"], depth=MODEL["depth"])
    start_ranks(2)
    MODEL.update(embed_dim=arguments.hidden, depth=arguments.depth)
    variants = [
        Variant("off", BalanceConfig(mode="off")),
        Variant("resize, columns", BalanceConfig(mode="resize", pruning=Pruning(resizing="column"))),
        Variant("resize, blocks", BalanceConfig(mode="resize")),
        Variant("auto", BalanceConfig(mode="auto")),
    ]
    free = Variant("no quota, off", BalanceConfig(mode="off"))
    for variant in [free, *variants]:
        variant.build()
    take_turns([free], warmup=4, rounds=3, block=4)
    with quota_on(1, arguments.quota):
        take_turns(variants, warmup=arguments.warmup, rounds=arguments.rounds, block=4)
    records = [variant.plugin.balancer.collect() or [] for variant in [free, *variants]]
    if dist.get_rank() != 0:
        return
    # In the second half of the iterations, plans are settled.
    settled = [part[len(part) // 2 :] for part in records]

    def typical(part: list[IterationRecord], rank: int, seconds: Callable[[RankRecord], float]) -> float:
        return median(seconds(record.ranks[rank]) for record in part)

    off = settled[1]
    communication = median(min(rank.communication_seconds for rank in record.ranks) for record in off)
    fixed = [typical(off, rank, lambda r: r.work_seconds - r.matmul_seconds) for rank in (0, 1)]
    most = BalanceConfig(mode="resize").largest_resize
    in_blocks = variants[2].plugin.balancer.kinds
    # Whole heads cannot be pruned as finely as columns.
    most_of_blocks = sum(
        kind.weight * (1 - kept_count(kind.units, most) / kind.units) for kind in in_blocks if kind.units
    )

    def floor(pruned: float) -> float:
        return typical(off, 1, lambda r: r.work_seconds - pruned * r.matmul_seconds) + communication

    best = {
        "resize, columns": floor(most),
        "resize, blocks": floor(most_of_blocks),
        "auto": lossless_seconds(fixed, [typical(off, rank, lambda r: r.matmul_seconds) for rank in (0, 1)])
        + communication,
    }
    rows = []
    for variant, part in zip([free, *variants], settled, strict=True):
        total, reachable = variant.median_seconds, best.get(variant.name)
        ratios = (f"{reachable:.3f}", f"{total / reachable:.2f}") if reachable else ("", "")
        against_off = f"{total / variants[0].median_seconds:.2f}"
        times = [
            typical(part, 1, lambda r: r.matmul_seconds),
            typical(part, 1, lambda r: r.work_seconds - r.matmul_seconds),
            typical(part, 1, lambda r: r.communication_seconds),
        ]
        shares = [f"{typical(part, 1, lambda r, name=name: getattr(r, name)):.0%}" for name in ("resized", "migrated")]
        rows.append((variant.name, total, against_off, *ratios, *times, *shares))
    columns = (
        *("variant", "iteration [s]", "/ off", "reachable [s]", "ratio"),
        *("movable [s]", "other work [s]", "collectives [s]", "resized", "migrated"),
    )
    title = f"Rank 1 of 2 under a CPU quota of {arguments.quota:g} of a core"
    notes = ["Movable work (products and the rest of blocks), other work, collectives and shares are those of rank 1."]
    print_table(title, columns, rows, notes)


if __name__ == "__main__":
    main()
