"""Apply a plan to this rank's layers and blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..layers.block import Block
from ..layers.column_migration import COLUMN_EXCHANGES, BroadcastReduce, ColumnMigration
from ..layers.linear import HeteroLinear
from ..layers.transport import Transport
from ..layers.unit_exchange import UnitExchange, bucket_numbers
from ..layers.workload import Clock, Workload, kept_count
from .config import BalanceConfig
from .divide import (
    BlockShape,
    Division,
    block_ports,
    busiest_port,
    column_traffic,
    divide,
    divide_counts,
    effective_grain,
)
from .modes import LayerKind
from .plan import BalancePlan, Traffic
from .pruning import ColumnSelector, Pruner, Target, cost_of
from .resharding import Resharding


@dataclass(frozen=True)
class Shares:
    """Shares of the cost of a rank's products that it prunes, gives and takes, in whole columns and units."""

    resized: float = 0.0
    migrated: float = 0.0
    resharded: float = 0.0  # permanently re-sharded
    received: float = 0.0
    loads: tuple[float, ...] = ()  # number of units that the rank computes in each of its blocks, by kind of layers

    @property
    def load(self) -> float:
        """Amount that the rank computes; 1 is its full share."""
        return 1.0 - self.resized - self.migrated - self.resharded + self.received


def columns_stay(config: BalanceConfig, blocks: Sequence[Block]) -> bool:
    """True if layers in no block stay as they are: mode "auto" moves blocks, as other activations cost more to send."""
    return config.mode == "auto" and config.moves_blocks and bool(blocks)


class Applier:
    def __init__(
        self,
        layers: Mapping[str, HeteroLinear],
        blocks: Sequence[Block],
        config: BalanceConfig,
        iterations_per_interval: int,
        transport: Transport | None = None,
        clock: Clock | None = None,
        resharding: Resharding | None = None,
    ) -> None:
        inside = {id(layer) for block in blocks for layer in block.layers}
        self._blocks = list(blocks)
        self._layers = [layer for layer in layers.values() if id(layer) not in inside]
        self._config = config
        self._targets: list[Target] = [*self._layers, *self._blocks]
        self._costs = [*map(cost_of, self._targets)]
        self._pruning = Pruner(self._targets, config.rules, config.largest_resize, iterations_per_interval)
        self._transport = transport
        # Layers that are in no block migrate by the paper's method.
        self._column_method = "broadcast-reduce" if config.migration == "block" else config.migration
        self._column_exchange: BroadcastReduce | None = None
        self._unit_exchange: UnitExchange | None = None
        if transport is not None:
            self._column_exchange = COLUMN_EXCHANGES[self._column_method](transport)
            self._unit_exchange = UnitExchange(transport, clock)
        self._columns_stay = columns_stay(config, blocks)
        self._kind_of: list[int | None] = []
        self.kinds = self._number_kinds()
        """Kinds that are balanced. Layers and blocks know their kind by its place in this list."""
        self._plan: BalancePlan | None = None
        self._resharding = resharding
        self.for_good = False
        self._uneven: frozenset[int] = frozenset()  # numbers of the blocks whose units are permanently re-sharded
        self.shares = Shares(loads=tuple(kind.full for kind in self.kinds))

    def _number_kinds(self) -> list[LayerKind]:
        """Give each target its kind: blocks with the same sizes are one kind, and all other layers another one."""
        self._kind_of = [None] * len(self._targets)
        numbers: dict[str, int] = {}
        # Kinds of blocks come first: a plan has their counts in this order.
        for place, target in sorted(enumerate(self._targets), key=lambda item: not isinstance(item[1], Block)):
            if isinstance(target, Block):
                shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in target.parameters]
                sizes = f"{target.units} units of {shapes}"
            elif self._columns_stay:
                continue
            else:
                sizes = "columns"
            number = numbers.setdefault(sizes, len(numbers))
            self._kind_of[place] = number
            target.kind = number
            for layer in target.layers if isinstance(target, Block) else ():
                layer.kind = number  # which it marks in the clock
        total = sum(cost for cost, kind in zip(self._costs, self._kind_of, strict=True) if kind is not None)
        kinds = []
        for number in range(len(numbers)):
            members = [place for place, kind in enumerate(self._kind_of) if kind == number]
            first = self._targets[members[0]]
            weight = sum(self._costs[place] for place in members) / total
            units = first.units if isinstance(first, Block) else None
            kinds.append(LayerKind(units, 1 if units is None else effective_grain(units), weight))
        return kinds

    def present_kinds(self) -> list[LayerKind]:
        """:attr:`kinds`, with ``moves`` false if blocks cannot migrate now."""
        of_blocks = list(zip(self._blocks, self._kind_of[len(self._layers) :], strict=True))
        fixed = {number for block, number in of_blocks if not block.moves}
        fixed |= {number for _, number in of_blocks} - {number for block, number in of_blocks if not block.stays}
        return [replace(kind, moves=number not in fixed) for number, kind in enumerate(self.kinds)]

    @property
    def units(self) -> UnitExchange:
        """Messages of units, which need a transport."""
        assert self._unit_exchange is not None
        return self._unit_exchange

    def prune(self, ratio: float) -> None:
        """Prune ``ratio`` of the work of a single rank from the next forward pass on."""
        self.apply(BalancePlan(resize=(ratio,), migrate=(0.0,), receive=(0.0,)))

    def apply(self, plan: BalancePlan, for_good: bool = False) -> None:
        """Apply this rank's part of ``plan`` from the next iteration on; call it on all ranks of the group. With
        ``for_good``, units of blocks move once where that is possible, or back; others migrate in each iteration."""
        self._plan = plan
        self.for_good = for_good
        if plan.units or any((*plan.resize, *plan.migrate)):
            for block in self._blocks:
                block.drops_by_unit = True
        self._pruning.start(plan.resize[self._rank])
        self._assign()

    def seen(self, asks_for_heads: bool) -> list[bool]:
        """:meth:`.Block.is_seen` of each block on this rank."""
        return [block.is_seen(asks_for_heads) for block in self._blocks]

    def sees_more(self, asks_for_heads: bool) -> bool:
        """True if somebody on this rank sees inside of a block whose units need not stay so far."""
        return any(not block.stays and block.is_seen(asks_for_heads) for block in self._blocks)

    def keep(self, stays: Sequence[bool]) -> bool:
        """Fix the blocks with ``stays``, equal on all ranks, from the next plan on; returns whether any changes."""
        changes = [block.stays for block in self._blocks] != list(stays)
        for block, stay in zip(self._blocks, stays, strict=True):
            block.stays = stay
        return changes

    def traffic(self, plan: BalancePlan, bytes_per_element: int, passes: int) -> Traffic:
        """Traffic that ranks would wait for under ``plan`` in an iteration like those so far, with so many ``passes``:
        of columns all that the group sends, of blocks what the busiest rank waits for."""
        assert self._transport is not None
        total = Traffic()
        divisions = self._divide(plan)
        for layer, division in zip(self._layers, divisions, strict=False):
            rows = layer.rows // max(1, layer.passes)
            total += column_traffic(
                *(division.moves, layer.matrix.shape[0], rows, layer.passes, self._transport.size, bytes_per_element),
                column_parallel=layer.column_parallel,
                method=self._column_method,
            )
        moves = [division.moves for division in divisions[len(self._layers) :]]
        shapes = [BlockShape(block.elements_per_unit, len(block.layers)) for block in self._blocks]
        numbers = bucket_numbers(self._blocks, moves)
        ports = block_ports(shapes, moves, numbers, self._transport.size, bytes_per_element)
        return total + Traffic(point_to_point=busiest_port(ports)) * passes

    def end_iteration(self) -> None:
        """Let layers choose columns again; at the end of an interval update the priorities."""
        for layer in self._layers:
            layer.begin_iteration()
        if self._pruning.end_iteration():
            self._assign()

    @property
    def _rank(self) -> int:
        return 0 if self._transport is None else self._transport.rank

    def _assign(self) -> None:
        assert self._plan is not None
        rank, ratios = self._rank, self._pruning.ratios()
        divisions = self._divide(self._plan)
        kept = []
        for target, ratio, division in zip(self._targets, ratios, divisions, strict=True):
            share = 0.0 if isinstance(target, Block) and target.stays else float(ratio)
            kept.append(max(1, kept_count(target.contraction_columns, share) - division.given(rank)))
        self._assign_layers(ratios, divisions)
        self._assign_blocks(kept, divisions)
        self.shares = self._measure(kept, divisions)

    def _divide(self, plan: BalancePlan) -> list[Division]:
        idle = BalancePlan.idle(len(plan.resize))
        divisions = []
        for target, kind in zip(self._targets, self._kind_of, strict=True):
            columns = target.contraction_columns
            if isinstance(target, Block) and (target.stays or target.moves is False):
                divisions.append(divide(columns, idle))
            elif plan.units and isinstance(target, Block):
                assert kind is not None
                divisions.append(divide_counts(columns, plan.units[kind]))
            else:
                divisions.append(divide(columns, idle if kind is None else plan))
        return divisions

    def _assign_layers(self, ratios: np.ndarray, divisions: Sequence[Division]) -> None:
        selectors: Sequence[ColumnSelector | None] = self._pruning.selectors or [None] * len(self._targets)
        for layer, ratio, division, selector in zip(self._layers, ratios, divisions, selectors, strict=False):
            workload = migration = None
            if selector is not None and ratio > 0:
                workload = Workload(prune=float(ratio), select=selector, imputation=self._config.rules.imputation)
            if division.moves:
                assert self._column_exchange is not None
                migration = ColumnMigration(self._column_exchange, division.moves)
            layer.assign(workload, migration)

    def _assign_blocks(self, kept: Sequence[int], divisions: Sequence[Division]) -> None:
        first = len(self._layers)
        selectors: Sequence[ColumnSelector | None] = self._pruning.selectors[first:] or [None] * len(self._blocks)
        if self._unit_exchange is not None:
            moves = [division.moves for division in divisions[first:]]
            if self._resharding is not None:
                self._unit_exchange.release(self._blocks)
                self._uneven = self._resharding.arrange(
                    moves if self.for_good else [()] * len(moves), self._unit_exchange.largest_growth[1]
                )
            migrates = [number not in self._uneven for number in range(len(moves))]
            self._unit_exchange.assign(
                self._blocks,
                [each if migrates[number] else () for number, each in enumerate(moves)],
                [
                    count if migrates[number] else self._blocks[number].units
                    for number, count in enumerate(kept[first:])
                ],
                selectors,
            )

    def _measure(self, kept: Sequence[int], divisions: Sequence[Division]) -> Shares:
        resized = migrated = resharded = received = 0.0
        loads, costs = [0.0] * len(self.kinds), [0.0] * len(self.kinds)
        for number, (target, kind, cost, kept_units, division) in enumerate(
            zip(self._targets, self._kind_of, self._costs, kept, divisions, strict=True), -len(self._layers)
        ):
            given, taken = division.given(self._rank), division.taken(self._rank)
            columns = target.contraction_columns
            if kind is not None:
                loads[kind] += cost * (kept_units + taken) / columns
                costs[kind] += cost
            resized += cost * (columns - given - kept_units) / columns
            if number in self._uneven:
                resharded += cost * given / columns
            else:
                migrated += cost * given / columns
            received += cost * taken / columns
        total = sum(self._costs) or 1
        loads = [kind.full * load / cost for kind, load, cost in zip(self.kinds, loads, costs, strict=True)]
        return Shares(resized / total, migrated / total, resharded / total, received / total, tuple(loads))
