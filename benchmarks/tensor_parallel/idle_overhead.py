"""The cost of balancing when no rank is slow: iteration time and peak memory relative to Colossal-AI's plugin.

python -m benchmarks.tensor_parallel.idle_overhead [--rounds 12]

Time: the variants take turns in the same two processes, iteration by iteration; the ratio is the median over the
iterations of each one's ratio to that of the plain plugin in the same turn. The control is a second plain plugin.
Memory: each variant runs alone, in processes of its own.
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

VARIANTS = {"plain": None, "plain (control)": None} | {
    mode: BalanceConfig(mode=mode) for mode in ("off", "resize", "auto")
}


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
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--no-memory", action="store_true", help="measure times only")
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--peaks", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        measure_peak(arguments.peak_of)
        return
    if "RANK" not in os.environ and not arguments.no_memory:
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
    take_turns(variants, warmup=12, rounds=arguments.rounds, block=1)
    memory = [int(value) for value in arguments.peaks.split(",")] if arguments.peaks else [0] * len(variants)
    rows = []
    for variant, peak in zip(variants, memory, strict=True):
        ratios = [seconds / plain for seconds, plain in zip(variant.seconds, variants[0].seconds, strict=True)]
        of_memory = (peak / 2**20, peak / memory[0]) if memory[0] else ("", "")
        rows.append((variant.name, variant.median_seconds, f"{median(ratios):.4f}", *of_memory))
    columns = ("variant", "iteration [s]", "ratio", "peak memory [MiB]", "ratio")
    print_table("No straggler, relative to Colossal-AI's plugin (2 ranks)", columns, rows)


if __name__ == "__main__":
    main()
