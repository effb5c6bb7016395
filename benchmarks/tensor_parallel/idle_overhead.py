"""The cost of balancing when no rank is slow: iteration time and peak memory relative to Colossal-AI's plugin.

python -m benchmarks.tensor_parallel.idle_overhead [--rounds 100] [--no-memory]

Time: the variants take turns in the same two processes, iteration by iteration; the ratio is the median over the
iterations of each one's ratio to that of the plain plugin in the same turn. The control is a second plain plugin.
Host time: what the balancer does before and after an iteration (median and mean; some iterations end with a decision,
in which ranks wait for each other), and the marks of its clock. It is much more exact than the difference of two
iteration times, but does not contain what layers do otherwise than the plain ones.
Memory: each variant runs alone, in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import fmean, median
from timeit import timeit
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.common import Variant, print_table, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.colossalai_support.accelerator import get_accelerator
from colossal_hetero.layers import hetero_layers

HOST_ITERATIONS = 24
"""The number of iterations in which host times are measured."""

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


def host_seconds(variant: Variant) -> tuple[float, float, float]:
    """Host seconds per iteration: median and mean of the balancer's own code, and of the marks of one layer."""
    balancer: Any = variant.plugin.balancer
    spent: list[float] = []
    marks = 0

    def timed(call: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            start = time.perf_counter()
            call(*arguments, **named)
            spent.append(time.perf_counter() - start)

        return run

    def counted(*arguments: Any) -> None:
        nonlocal marks
        marks += 1
        mark(*arguments)

    clock = balancer._clock
    mark = clock.mark
    with (
        patch.object(balancer, "begin", timed(balancer.begin)),
        patch.object(balancer, "tick", timed(balancer.tick)),
        patch.object(clock, "mark", counted),
    ):
        for _ in range(HOST_ITERATIONS):
            variant.iterate()
    calls = 10_000
    of_mark = timeit(lambda: mark("other", 0), number=calls) / calls
    marks_per_layer = marks / HOST_ITERATIONS / len(hetero_layers(variant.model))
    of_balancer = [begin + tick for begin, tick in zip(spent[::2], spent[1::2], strict=True)]
    return median(of_balancer), fmean(of_balancer), marks_per_layer * of_mark


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
        of_host: tuple[str, ...] = ("", "")
        if variant.balance is not None:
            middle, mean, marks = host_seconds(variant)
            of_host = (f"{1e3 * middle:.2f}, {1e3 * mean:.2f}", f"{1e6 * marks:.1f}")
        rows.append((variant.name, variant.median_seconds, f"{median(ratios):.4f}", *of_host, *of_memory))
    columns = (
        *("variant", "iteration [s]", "ratio", "balancer's host time [ms]", "marks of a layer [µs]"),
        *("peak memory [MiB]", "ratio"),
    )
    print_table("No straggler, relative to Colossal-AI's plugin (2 ranks)", columns, rows)


if __name__ == "__main__":
    main()
