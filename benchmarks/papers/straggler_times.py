"""Iteration times of SEMI's methods on two ranks, of which one does its products χ times (times for Figs. 9 and 10).

python -m benchmarks.papers.straggler_times --out FILE.json [--rounds 2]

Methods take turns in the same processes.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from benchmarks.common import Variant, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.common.files import write_json
from colossal_hetero.testing.stragglers import Stragglers

METHODS = ("zero-pri", "zero-pridiff-e", "zero-pridiff-r", "mig", "semi")
SLOWDOWNS = (1.0, 2.0, 4.0, 8.0)


def variants(slowdown: float) -> list[Variant]:
    slow = Stragglers(slowdowns={1: slowdown})
    found = [Variant("off", BalanceConfig(mode="off"), slow)]
    if slowdown > 1:
        found += [Variant(name, BalanceConfig.paper(name), slow) for name in METHODS]
        found.append(Variant("auto", BalanceConfig(mode="auto"), slow))
    return found


def main() -> None:
    arguments = read_options(__doc__, out=Path, rounds=2)
    start_ranks(2)
    seconds = {}
    for slowdown in SLOWDOWNS:
        compared = variants(slowdown)
        for variant in compared:
            variant.build()
        take_turns(compared, warmup=10, rounds=arguments.rounds, block=3)
        seconds |= {f"{variant.name}, {slowdown:g}": variant.median_seconds for variant in compared}
    if dist.get_rank() == 0:
        write_json(seconds, arguments.out)


if __name__ == "__main__":
    main()
