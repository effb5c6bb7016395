"""Each parallel layer idle, with pruned and with migrated columns, compared with exact results. Runs on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero.balance.clock import make_clock
from colossal_hetero.balance.divide import Move, divide
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.layers import Workload
from colossal_hetero.layers.column_migration import BroadcastReduce, ColumnMigration
from colossal_hetero.layers.transport import Transport
from colossal_hetero.layers.workload import IMPUTATIONS, kept_count

from .parallel_layers import KINDS, Distances, OfRank, Problem, Sizes

__all__ = ["column_distances", "migrating_plan"]

PRUNED, MIGRATED = 1 / 4, 0.4
"""Shares of a rank's columns or units."""

Comparisons = Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]
"""What this rank computed, and what it must compute."""


def column_distances(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Distances:
    """How far all workloads of all layers are from exact results, on this rank. Collective over all ranks."""
    # Products in fp32, not in TF32.
    torch.set_float32_matmul_precision("highest")
    transport = Transport(dist.group.WORLD)  # type: ignore[arg-type]
    transport.connect(device)
    found = Distances.in_precision(dtype)
    for kind in KINDS:
        problem = Problem(kind, sizes, dtype, device)
        of_dense = problem.distances_of_dense()
        for workload, compare in _workloads(device, transport).items():
            for actual, exact in compare(problem):
                found.add(workload, kind.name, actual, exact, of_dense)
    return found


def migrating_plan(pruned: float = 0.0) -> BalancePlan:
    """Rank 0 gives :data:`MIGRATED` of its work to all others, and prunes the share ``pruned``."""
    others = dist.get_world_size() - 1
    return BalancePlan((pruned, *[0.0] * others), (MIGRATED, *[0.0] * others), (0.0, *[MIGRATED / others] * others))


def _workloads(device: torch.device, transport: Transport) -> dict[str, Callable[[Problem], Comparisons]]:
    clock = make_clock(device)
    clock.start()
    return {
        "idle": partial(_idle, clock=None),
        "idle, with a clock": partial(_idle, clock=clock),
        **{f"columns pruned, imputation {name}": partial(_pruned, imputation=name) for name in IMPUTATIONS},
        "columns migrated": partial(_migrated, transport, 0.0),
        "columns pruned and migrated": partial(_migrated, transport, PRUNED),
    }


def _idle(problem: Problem, clock: Any) -> Comparisons:
    layer, batch = problem.layer(), problem.batch()
    layer.clock = clock
    yield problem.run(layer, batch), problem.exact(batch)[dist.get_rank()].results


def _pruned(problem: Problem, imputation: str) -> Comparisons:
    layer = problem.layer()
    kept: list[Tensor] = []
    layer.assign(
        Workload(prune=PRUNED, select=lambda x, weight, count: kept[dist.get_rank()], imputation=imputation)  # type: ignore[arg-type]
    )
    before: list[OfRank] | None = None
    # "same" takes what the previous iteration computed.
    for seed in range(2 if imputation == "same" else 1):
        drawn = [_kept(problem.columns, rank, seed) for rank in range(dist.get_world_size())]
        kept[:] = [columns.to(problem.weight.device) for columns in drawn]
        layer.begin_iteration()
        batch = problem.batch(seed)
        before = problem.exact(batch, kept, imputation, before)
        yield problem.run(layer, batch), before[dist.get_rank()].results


def _migrated(transport: Transport, pruned: float, problem: Problem) -> Comparisons:
    layer, batch = problem.layer(), problem.batch()
    moves: tuple[Move, ...] = divide(problem.columns, migrating_plan()).moves
    workload = None
    kept: list[Tensor | None] = [None] * dist.get_world_size()
    if pruned:
        given = sum(move.units for move in moves)
        own = torch.arange(kept_count(problem.columns, pruned) - given, device=problem.weight.device)
        kept[0] = torch.cat([own, torch.arange(problem.columns - given, problem.columns, device=own.device)])
        if dist.get_rank() == 0:
            workload = Workload(prune=pruned, select=lambda x, weight, count: own)
    layer.assign(workload, ColumnMigration(BroadcastReduce(transport), moves))
    yield problem.run(layer, batch), problem.exact(batch, kept)[dist.get_rank()].results


def _kept(columns: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randperm(columns, generator=generator)[: kept_count(columns, PRUNED)].sort().values
