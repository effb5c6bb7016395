"""The cost of migrating when no rank is slow: SEMI's Table I, by migration method.

python -m benchmarks.papers.policies [--ranks 8] [--rounds 2] [--senders 1 4] [--out FILE.json]

The first ``senders`` ranks migrate a share γ of their work to the others, which receive equal parts. No rank is slow,
so the difference from γ = 0 is the cost of migrating plus the additional work of the receivers. All methods take turns
in the same processes. If there are more ranks than cores, the iteration time depends on the total work of all ranks,
not on the slowest rank. The package has ``block`` and the paper's ``broadcast-reduce``; ``scatter-gather``, with which
the paper compares it, is here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import MODEL, Variant, print_table, start_ranks, take_turns
from colossal_hetero import BalanceConfig
from colossal_hetero.balance import apply
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.common.files import write_json
from colossal_hetero.layers.column_migration import BroadcastReduce, MovedRange

METHODS = ("broadcast-reduce", "scatter-gather", "block")
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = 10**9


class ScatterGather(BroadcastReduce):
    """The method that the paper compares with: the sender exchanges messages with each receiver."""

    merges = False

    def distribute(
        self, moves: Sequence[MovedRange], given: Tensor | None, like: Tensor, rows: int
    ) -> list[Tensor | None]:
        first, rank = moves[0].start, self.transport.rank
        sends = [] if given is None else [
            (move.receiver, given[:, move.start - first : move.stop - first].contiguous()) for move in moves
        ]  # fmt: skip
        parts = [like.new_empty(rows, move.stop - move.start) if move.receiver == rank else None for move in moves]
        receives = [(move.sender, part) for move, part in zip(moves, parts, strict=True) if part is not None]
        self.transport.exchange(sends, receives).wait()
        return parts

    def broadcast(
        self, moves: Sequence[MovedRange], given: Tensor | None, shape: tuple[int, int], like: Tensor
    ) -> Tensor | None:
        sender, rank = moves[0].sender, self.transport.rank
        if rank == sender:
            assert given is not None
            given = given.contiguous()
            self.transport.exchange([(move.receiver, given) for move in moves], []).wait()
            return given
        if all(move.receiver != rank for move in moves):
            return None
        whole = like.new_empty(shape)
        self.transport.exchange([], [(sender, whole)]).wait()
        return whole

    def reduce(self, moves: Sequence[MovedRange], result: Tensor) -> None:
        sender, rank = moves[0].sender, self.transport.rank
        if rank == sender:
            parts = [torch.empty_like(result) for _ in moves]
            self.transport.exchange([], [(move.receiver, part) for move, part in zip(moves, parts, strict=True)]).wait()
            for part in parts:
                result += part
        elif any(move.receiver == rank for move in moves):
            self.transport.exchange([(sender, result)], []).wait()


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--hidden", type=int, default=MODEL["embed_dim"], help="width of the ViT")
    parser.add_argument("--out", type=Path, help="file for the seconds of each cell")
    arguments = parser.parse_args()
    start_ranks(arguments.ranks)
    MODEL["embed_dim"] = arguments.hidden
    variants = {}
    for method in METHODS:
        form: Any = "block" if method == "block" else "broadcast-reduce"
        config = BalanceConfig(mode="migrate", migration=form, warmup_iterations=NEVER, measure_costs=False)
        variants[method] = Variant(method, config)
        exchange = ScatterGather if method == "scatter-gather" else BroadcastReduce
        with patch.object(apply, "BroadcastReduce", exchange):
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
