"""Resizing with an injected straggler: iteration time relative to no straggler, and how fast the plan follows.

python -m benchmarks.tensor_parallel.straggler [--slowdown 4] [--rounds 8]

Rank 1 computes its products ``slowdown`` times (``repeat``), so resizing shrinks the repeated work too. Resizing uses
``reference="minimum"``. Three models take turns in the same two processes: without a straggler, with a straggler and no
balancing, and with a straggler and resizing.
"""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.common import Variant, print_table, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.layers import hetero_layers
from colossal_hetero.testing.stragglers import Stragglers

CLOSE = 0.1
"""Shares that differ by at most this are close."""


def share_over_time(variant: Variant, before: float, after: float) -> list[float]:
    """The share that rank 1 prunes after each of 20 iterations, after its slowdown has changed."""
    slow_down = next(iter(hetero_layers(variant.model).values())).slow_down

    def iterate(slowdown: float) -> float:
        """Run one iteration; returns the share at its end."""
        if dist.get_rank() == 1:
            slow_down.factor = slowdown
        variant.iterate()
        return variant.plugin.balancer.plan.resize[1]

    for _ in range(12):
        iterate(before)
    return [iterate(after) for _ in range(20)]


def iterations_until(shares: list[float], precision: float) -> int:
    """The number of iterations from which on shares differ from the last one by at most ``precision``."""
    return max((number for number, share in enumerate(shares, 1) if abs(share - shares[-1]) > precision), default=0) + 1


def main() -> None:
    arguments = read_options(__doc__, slowdown=4.0, rounds=8)
    start_ranks(2)
    slow = Stragglers(slowdowns={1: arguments.slowdown})
    resize = BalanceConfig(mode="resize")
    variants = [
        Variant("no straggler, off", BalanceConfig(mode="off")),
        Variant("slow, off", BalanceConfig(mode="off"), slow),
        Variant("slow, resize", resize, slow),
    ]
    for variant in variants:
        variant.build()
    take_turns(variants, warmup=8, rounds=arguments.rounds, block=4)
    base = variants[0].median_seconds
    rows = []
    for variant in variants:
        records = variant.plugin.balancer.collect()
        resized = records[-1].ranks[1].resized if records else 0.0
        rows.append((variant.name, variant.median_seconds, variant.median_seconds / base, resized))
    title = f"Slowdown {arguments.slowdown:g} injected on rank 1 of 2 (products repeated)"
    print_table(title, ("variant", "iteration [s]", "ratio", "share resized on rank 1"), rows)

    turning = Variant("turning", resize, Stragglers(slowdowns={1: 1.0}))
    turning.build()
    settled = []
    for _ in range(3):
        for before, after in ((1.0, arguments.slowdown), (arguments.slowdown, 1.0)):
            shares = share_over_time(turning, before, after)
            settled.append(
                (
                    f"{before:g}× to {after:g}×",
                    iterations_until(shares, CLOSE),
                    iterations_until(shares, 0.0),
                    shares[-1],
                )
            )
    print_table(
        "Iterations after a change of rank 1's speed until its share was close to that after 20, and equal to it",
        ("change", "close", "equal", "share after 20"),
        settled,
    )


if __name__ == "__main__":
    main()
