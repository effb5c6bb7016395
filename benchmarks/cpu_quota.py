"""Resizing when a rank is slow from outside: rank 1 under a CPU quota, of which the program knows nothing.

sudo python benchmarks/cpu_quota.py [--quota 0.25] [--rounds 8]

Needs Linux, cgroups (version 1 or 2) and the right to write to them. Everything that the rank does is slow, not only
its products, so no resizing brings it back to the others' speed. Its floor is the time of its work outside the parallel
layers plus (1 − γ_max) of its products, as measured without balancing under the same quota; the two models take turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch.distributed as dist
from common import MODEL, Variant, print_table, start_ranks, take_turns

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.records import RankRecord

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def cpu_quota(share: float, period_us: int) -> Iterator[None]:
    """Let this process use ``share`` of one core."""
    name = f"colossal_hetero_{os.getpid()}"
    quota_us = int(share * period_us)
    if (CGROUPS / "cpu").is_dir():
        group, parent = CGROUPS / "cpu" / name, CGROUPS / "cpu"
        settings = {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}
    else:
        group, parent = CGROUPS / name, CGROUPS
        settings = {"cpu.max": f"{quota_us} {period_us}"}
    group.mkdir()
    try:
        for file, value in settings.items():
            (group / file).write_text(value)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quota", type=float, default=0.25)
    parser.add_argument("--period-us", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=MODEL["embed_dim"], help="width of the ViT")
    arguments = parser.parse_args()
    start_ranks(2)
    MODEL["embed_dim"] = arguments.hidden
    resize = BalanceConfig(mode="resize", reference="minimum")
    variants = [Variant("off", BalanceConfig(mode="off")), Variant("resize", resize)]
    free = Variant("no quota, off", BalanceConfig(mode="off"))
    for variant in [free, *variants]:
        variant.build()
    take_turns([free], warmup=4, rounds=3, block=4)
    throttled = dist.get_rank() == 1
    if throttled:
        quota = cpu_quota(arguments.quota, arguments.period_us)
        quota.__enter__()
    try:
        take_turns(variants, warmup=8, rounds=arguments.rounds, block=4)
    finally:
        if throttled:
            quota.__exit__(None, None, None)
    records = [variant.plugin.balancer.collect() or [] for variant in [free, *variants]]
    if dist.get_rank() != 0:
        return
    # Settled: the last rounds, seen from rank 1.
    slow = [[record.ranks[1] for record in part[len(part) // 2 :]] for part in records]

    def typical(part: list, seconds: Callable[[RankRecord], float]) -> float:
        return median(seconds(rank) for rank in part)

    floor = typical(slow[1], lambda r: r.work_seconds - resize.max_resize * r.matmul_seconds)
    rows = []
    for variant, part in zip([free, *variants], slow, strict=True):
        times = [
            typical(part, lambda r: r.matmul_seconds),
            typical(part, lambda r: r.work_seconds - r.matmul_seconds),
            typical(part, lambda r: r.communication_seconds),
        ]
        total = variant.median_seconds
        rows.append((variant.name, total, total / floor, *times, typical(part, lambda r: r.resized)))
    title = f"Rank 1 of 2 under a CPU quota of {arguments.quota:g} of a core; its floor is {floor:.3f} s"
    columns = (
        "variant",
        "iteration [s]",
        "against the floor",
        "products [s]",
        "other work [s]",
        "collectives [s]",
        "resized",
    )
    print_table(title, columns, rows, ["Products, other work, collectives and the share resized are rank 1's."])


if __name__ == "__main__":
    main()
