"""The cost of balancing when no rank is slow: iteration time and peak memory relative to Colossal-AI's plugin.

python -m benchmarks.tensor_parallel.idle_overhead [--rounds 12]

Time: the three variants take turns in the same two processes. Memory: each variant runs alone, in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.common import Variant, print_table, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.accelerator import get_accelerator

VARIANTS = {"plain": None} | {mode: BalanceConfig(mode=mode) for mode in ("off", "resize", "auto")}


def measure_peak(name: str) -> None:
    """Print the largest peak memory of any rank after a few iterations of one variant."""
    start_ranks(2)
    variant = Variant(name, VARIANTS[name])
    variant.build()
    for _ in range(6):
        variant.iterate()
    peak = torch.tensor([get_accelerator().max_memory_allocated()], dtype=torch.int64)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"peak {peak.item()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        measure_peak(arguments.peak_of)
        return
    if "RANK" not in os.environ:
        peaks: dict[str, list[int]] = {name: [] for name in VARIANTS}
        for _ in range(3):
            for name, values in peaks.items():
                command = [sys.executable, "-m", __spec__.name, "--peak-of", name]
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                values.append(int(printed.split("peak ")[1].split()[0]))
        sys.argv += ["--peaks", ",".join(str(int(median(values))) for values in peaks.values())]
    start_ranks(2)
    variants = [Variant(name, balance) for name, balance in VARIANTS.items()]
    for variant in variants:
        variant.build()
    take_turns(variants, warmup=6, rounds=arguments.rounds, block=4)
    memory = [int(value) for value in arguments.peaks.split(",")]
    rows = [
        (v.name, v.median_seconds, v.median_seconds / variants[0].median_seconds, peak / 2**20, peak / memory[0])
        for v, peak in zip(variants, memory, strict=True)
    ]
    columns = ("variant", "iteration [s]", "ratio", "peak memory [MiB]", "ratio")
    print_table("No straggler, relative to Colossal-AI's plugin (2 ranks)", columns, rows)


if __name__ == "__main__":
    main()
