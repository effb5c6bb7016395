"""The cost of migrating when no rank is slow: SEMI's Table I, by migration method.

python -m benchmarks.papers.policies [--ranks 8] [--rounds 2] [--senders 1 4] [--out FILE.json]

The first ``senders`` ranks migrate a share γ of their work to the others, which receive equal parts. No rank is slow,
so the difference from γ = 0 is the cost of migrating plus the additional work of the receivers. All methods take turns
in the same processes. If there are more ranks than cores, the iteration time depends on the total work of all ranks,
not on the slowest rank.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from benchmarks.common import MODEL, Variant, print_table, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.common.files import write_json

METHODS = ("broadcast-reduce", "scatter-gather", "block")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = 10**9


def plan(senders: int, share: float) -> BalancePlan:
    """A plan in which the first ``senders`` ranks migrate ``share`` of their work to the others."""
    ranks = dist.get_world_size()
    taken = senders * share / (ranks - senders)
    return BalancePlan(
        resize=(0.0,) * ranks,
        migrate=(share,) * senders + (0.0,) * (ranks - senders),
        receive=(0.0,) * senders + (taken,) * (ranks - senders),
    )


def main() -> None:
    arguments = read_options(__doc__, ranks=8, rounds=2, senders=(1, 4), hidden=MODEL["embed_dim"], out=Path)
    start_ranks(arguments.ranks)
    MODEL["embed_dim"] = arguments.hidden
    variants = {}
    for method in METHODS:
        config = BalanceConfig(mode="migrate", migration=method, warmup_iterations=NEVER, measure_costs=False)
        variants[method] = Variant(method, config)
        variants[method].build()
    seconds = {}
    sent = {}
    for senders in arguments.senders:
        for share in SHARES:
            for variant in variants.values():
                variant.seconds.clear()
                variant.plugin.balancer.follow(plan(senders, share))
            take_turns(list(variants.values()), warmup=2, rounds=arguments.rounds, block=2)
            for method, variant in variants.items():
                seconds[method, senders, share] = variant.median_seconds
                variant.plugin.balancer.traffic.reset()
                variant.iterate()
                traffic = variant.plugin.balancer.traffic.sent.values()
                totals = [0] * dist.get_world_size()
                dist.all_gather_object(totals, sum(counted.bytes for counted in traffic))
                sent[method, senders, share] = sum(totals) / 2**20
    if arguments.out is not None and dist.get_rank() == 0:
        write_json({f"{method}, {n}, {share:g}": value for (method, n, share), value in seconds.items()}, arguments.out)
    rows = [
        (
            f"{method} ({senders})",
            *(f"{seconds[method, senders, share]:.3f}" for share in SHARES),
            f"{sent[method, senders, 0.5]:.0f}",
        )
        for senders in arguments.senders
        for method in METHODS
    ]
    title = f"Seconds per iteration, {arguments.ranks} ranks, by the share γ that the first (n) ranks migrate"
    print_table(title, ("method (senders)", *(f"γ = {share:g}" for share in SHARES), "MiB sent at γ = ½"), rows)


if __name__ == "__main__":
    main()
