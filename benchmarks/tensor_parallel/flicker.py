"""A straggler that comes and goes every few iterations: each mode relative to no balancing.

python -m benchmarks.tensor_parallel.flicker [--slowdown 4] [--every 3] [--rounds 6]

Rank 1 of 2 computes its products ``slowdown`` times for ``every`` iterations, then once for as many iterations. Aim: at
most 1.02 times ``off``. Models take turns in blocks of whole periods. The times are sums over all iterations, also the
first ones, in which a mode may still treat the rank as slow.
"""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.common import Variant, print_table, read_options, start_ranks
from colossal_hetero import BalanceConfig
from colossal_hetero.layers import hetero_layers
from colossal_hetero.testing.stragglers import Stragglers

MODES = ("off", "off again", "resize", "migrate", "semi", "auto")


def main() -> None:
    arguments = read_options(__doc__, slowdown=4.0, every=3, modes=MODES, rounds=6)
    start_ranks(2)
    variants = []
    for mode in arguments.modes:
        config = BalanceConfig(mode=mode.split()[0])
        variants.append(Variant(mode, config, Stragglers(slowdowns={1: 1.0})))
        variants[-1].build()
    for variant in variants:
        for _ in range(3):
            variant.iterate()
    changes = dict.fromkeys(arguments.modes, 0)
    for _ in range(arguments.rounds):
        for variant in variants:
            slow_down = next(iter(hetero_layers(variant.model).values())).slow_down
            dist.barrier()
            for number in range(8 * arguments.every):
                slow = dist.get_rank() == 1 and number // arguments.every % 2 == 0
                slow_down.factor = arguments.slowdown if slow else 1.0
                plan = variant.plugin.balancer.plan
                variant.seconds.append(variant.iterate())
                changes[variant.name] += variant.plugin.balancer.plan != plan
    base = sum(variants[0].seconds)
    rows = [
        (variant.name, sum(variant.seconds), sum(variant.seconds) / base, changes[variant.name]) for variant in variants
    ]
    title = f"Slowdown {arguments.slowdown:g} on rank 1 of 2, on and off every {arguments.every} iterations"
    iterations = len(variants[0].seconds)
    print_table(title, ("mode", f"{iterations} iterations [s]", "/ off", "plan changes"), rows)


if __name__ == "__main__":
    main()
