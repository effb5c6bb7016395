"""Exact training with a straggler, relative to the shortest possible time: modes ``migrate`` and ``auto``, by method.

python -m benchmarks.tensor_parallel.lossless [--slowdown 8] [--rounds 8] [--hidden 512] [--methods METHOD …] …

Rank 1 of 2 computes every product ``slowdown`` times. The bound assumes that the products are divided optimally: it is
their time without a straggler, times ``e/(e − 1 + 1/χ)``, plus the remaining time of an iteration without a straggler.
``migrate`` always migrates so much that all ranks finish at the same time; ``auto`` does so only if that saves time.
All models take turns in the same two processes.
"""

from __future__ import annotations

from statistics import median

from benchmarks.common import MODEL, Variant, print_table, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.balance.report import ideal_ratio
from colossal_hetero.testing.stragglers import Stragglers

WARMUP = 12
METHODS = ("block", "broadcast-reduce", "scatter-gather")


def main() -> None:
    arguments = read_options(
        __doc__, slowdown=8.0, rounds=8, hidden=MODEL["embed_dim"], micro_batches=1, methods=METHODS
    )
    start_ranks(2)
    MODEL["embed_dim"] = arguments.hidden
    slow = Stragglers(slowdowns={1: arguments.slowdown})
    variants = [
        Variant("no straggler, off", BalanceConfig(mode="off")),
        Variant("slow, off", BalanceConfig(mode="off"), slow),
    ]
    for method in arguments.methods:
        variants.append(Variant(f"migrate, {method}", BalanceConfig(mode="migrate", migration=method), slow))
        variants.append(Variant(f"auto, {method}", BalanceConfig(mode="auto", migration=method), slow))
    for variant in variants:
        variant.micro_batches = arguments.micro_batches
        variant.build()
    take_turns(variants, warmup=WARMUP, rounds=arguments.rounds, block=4)
    rows = []
    base = bound = float("nan")
    notes = []
    for variant in variants:
        # In mode "off", not all iterations have records.
        records = [record for record in variant.plugin.balancer.collect() or [] if record.iteration >= WARMUP]
        if not records:
            continue
        seconds = variant.median_seconds
        if not rows:
            # The time of the products without a straggler: that of the slower of the two equal ranks.
            products = median(max(rank.matmul_seconds for rank in record.ranks) for record in records)
            base = seconds
            bound = seconds - products + ideal_ratio(slow.slowdowns, 2) * products
            notes.append(f"Products {products:.3f} s of {seconds:.3f} s; bound {bound:.3f} s.")
        migrated = records[-1].ranks[1].migrated
        rows.append((variant.name, seconds, seconds / base, seconds / bound, f"{migrated:.0%}"))
        if records[-1].note:
            notes.append(f"{variant.name}: {records[-1].note}.")
    columns = ("variant", "iteration [s]", "/ no straggler", "/ bound", "migrated")
    print_table(f"Slowdown {arguments.slowdown:g} on rank 1 of 2, nothing pruned", columns, rows, notes)


if __name__ == "__main__":
    main()
