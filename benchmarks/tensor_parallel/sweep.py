"""Mode ``auto`` against the best of many fixed divisions, with a constant straggler.

python -m benchmarks.tensor_parallel.sweep [--slowdowns 1.3 2 4 8] [--heads 8] [--rounds 6]

Rank 1 of 2 computes every product ``slowdown`` times. One model follows fixed divisions, one after the other: the same
share of all blocks in steps, and the divisions next to the one of ``auto`` (a head more or fewer, a tenth of the
neurons more or fewer). Another model, with ``auto``, takes turns with it in the same two processes. A control does not
balance. What is pruned: nothing.
"""

from __future__ import annotations

from statistics import median

import torch.distributed as dist

from benchmarks.common import MODEL, Variant, print_table, read_options, start_ranks
from colossal_hetero import BalanceConfig
from colossal_hetero.balance import BalancePlan
from colossal_hetero.testing.stragglers import Stragglers

SETTLED = 120
"""Iterations after which ``auto`` has chosen its division."""
BLOCK = 4
"""Iterations of a division at a time."""
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


def shares_of(units: tuple[tuple[int, int], ...], full: tuple[int, ...]) -> BalancePlan:
    """The plan in which rank 1 gives what is missing in ``units``; its shares are only for display."""
    given = max(
        0.0, sum(1.0 - of_kind[1] / all_units for of_kind, all_units in zip(units, full, strict=True)) / len(full)
    )
    return BalancePlan((0.0, 0.0), (0.0, given), (given, 0.0), units=units)


def candidates(chosen: tuple[tuple[int, int], ...], full: tuple[int, ...]) -> dict[str, BalancePlan]:
    """Fixed divisions by name; ``chosen`` is that of ``auto``."""
    found: dict[tuple[tuple[int, int], ...], str] = {}

    def add(name: str, kept: list[int]) -> None:
        if all(1 <= count <= units for count, units in zip(kept, full, strict=True)):
            found.setdefault(tuple((2 * units - count, count) for count, units in zip(kept, full, strict=True)), name)

    for share in SHARES:
        add(f"{share:.1%} of each", [max(1, round(units * (1.0 - share))) for units in full])
    kept = [counts[1] for counts in chosen]
    add("as auto", kept)
    for place, units in enumerate(full):
        step = max(1, units // 16)
        for change in (-step, step):
            add(f"as auto, kind {place} {change:+d}", [*kept[:place], kept[place] + change, *kept[place + 1 :]])
    return {name: shares_of(units, full) for units, name in found.items()}


def measure(slowdown: float, rounds: int) -> None:
    stragglers = Stragglers(slowdowns={1: slowdown})
    auto = Variant("auto", BalanceConfig(mode="auto"), stragglers)
    fixed = Variant("fixed", BalanceConfig(mode="migrate", warmup_iterations=10**9, measure_costs=False), stragglers)
    off = Variant("off", BalanceConfig(mode="off"), stragglers)
    for variant in (auto, fixed, off):
        variant.build()
    changes, plan = 0, auto.plugin.balancer.plan
    for _ in range(SETTLED):
        auto.iterate()
        changes += auto.plugin.balancer.plan != plan
        plan = auto.plugin.balancer.plan
    for variant in (fixed, off):
        for _ in range(4):
            variant.iterate()
    full = tuple(int(kind.full) for kind in auto.plugin.balancer.kinds)
    chosen = plan.units or tuple((units, units) for units in full)
    plans = candidates(chosen, full)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(rounds):
        for name, each in plans.items():
            fixed.plugin.balancer.follow(each)
            dist.barrier()
            fixed.iterate()
            seconds[name].extend(fixed.iterate() for _ in range(BLOCK))
        for other in (auto, off):
            dist.barrier()
            other.iterate()
            other.seconds.extend(other.iterate() for _ in range(2 * BLOCK))
    last = auto.plugin.balancer.plan.units or chosen
    medians = {name: median(values) for name, values in seconds.items()}
    best = min(medians, key=lambda name: medians[name])
    rows = [(name, str(plans[name].units), value, value / medians[best]) for name, value in medians.items()]
    rows.append(("auto", str(last), auto.median_seconds, auto.median_seconds / medians[best]))
    rows.append(("off", "", off.median_seconds, off.median_seconds / medians[best]))
    print_table(
        f"Slowdown {slowdown:g} on rank 1 of 2, {MODEL['num_heads'] // 2} heads per rank",
        ("division", "units of ranks 0 and 1, by kind", "iteration [s]", "/ best fixed"),
        rows,
        [f"auto changed its plan {changes} times in {SETTLED} iterations; {auto.plugin.balancer.plan.note}."],
    )


def main() -> None:
    arguments = read_options(
        __doc__, slowdowns=(1.3, 2.0, 4.0, 8.0), hidden=MODEL["embed_dim"], heads=MODEL["num_heads"], rounds=6
    )
    start_ranks(2)
    MODEL.update(embed_dim=arguments.hidden, num_heads=arguments.heads)
    for slowdown in arguments.slowdowns:
        measure(slowdown, arguments.rounds)


if __name__ == "__main__":
    main()
