"""Shards of blocks that are uneven for good: weights, gradients and optimizer state of units change their rank once, so
that a block's layers are ordinary layers of uneven width. Whatever reads or writes shards, such as a checkpoint, does
so inside :meth:`Resharding.ordinary_shards`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor, nn

from ..layers.block import Block
from ..layers.column_migration import MovedRange
from ..layers.transport import Transport, check_room
from ..layers.unit_mover import Holding, StateSlot, UnitMover, holdings, unit_count
from .host_messages import Exchange

Arrangement = dict[int, tuple[Holding, ...]]
"""Holdings of all ranks by number of a block; blocks that are left out have ordinary shards."""


class OptimizerMemory(Protocol):
    """State that the optimizers of a model keep of parameters."""

    @property
    def obstacle(self) -> str | None:
        """Reason why units cannot change their rank for good, as a clause; None if they can."""

    def prepare(self) -> None:
        """Prepare for a move of units: nothing may depend any more on the present shapes of parameters."""

    def slots_of(self, parameter: Tensor) -> Sequence[StateSlot]:
        """State that optimizers keep of a parameter of the model: masters in higher precision, moments."""


BYTES_PER_PARAMETER = 16
"""Memory of a parameter that is trained by Adam: in fp32, or in half precision with an fp32 copy."""


class Resharding:
    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        transport: Transport,
        exchange: Exchange,
        memory: OptimizerMemory,
    ) -> None:
        self._blocks = blocks
        self._rank, self._ranks = transport.rank, transport.size
        self._exchange = exchange
        self._memory = memory
        self._mover = UnitMover(transport, memory.slots_of, exchange.all_agree)
        shared = _shared_parameters(model)
        self.possible = frozenset(
            number
            for number, block in enumerate(blocks)
            if block.reshards
            and not any(id(tensor) in shared for tensors in block.unit_parameters for tensor in tensors)
        )
        """Numbers of the blocks whose units can be permanently re-sharded."""
        self._held: Arrangement = {}
        self._failure: str | None = None
        self.keeps_shapes = False
        """True if units stay with their ranks, because something relies on the shapes of parameters."""

    @property
    def obstacle(self) -> str | None:
        """Reason why no units can be permanently re-sharded, as a clause; None if some can. Collective."""
        if not self.possible:
            return "no block has units that can be"
        # On any rank: a single one may copy the model, or register a hook.
        if not self._exchange.all_agree(not (self.keeps_shapes or any(block.is_hooked for block in self._blocks))):
            return "the model was copied, or a parameter has a hook, which may rely on the present shapes of parameters"
        obstacle = self._failure or self._memory.obstacle
        if self._exchange.all_agree(obstacle is None):
            return None
        return obstacle or "another rank has an optimizer that does not allow it"

    @property
    def is_active(self) -> bool:
        return bool(self._held)

    def arrange(self, moves: Sequence[Sequence[MovedRange]], work_before: float = 0.0) -> frozenset[int]:
        """Let ranks hold their units as after ``moves``, by block. Collective over the group. Returns the numbers of
        the blocks whose shards are uneven now: none if a rank has too little memory (:attr:`obstacle`). A GPU had the
        memory for the activations of taken units before, up to the share ``work_before`` of its own."""
        wanted = {
            number: holdings(self._blocks[number].units, self._ranks, moves[number])
            for number in sorted(self.possible)
            if moves[number]
        }
        if not (self._exchange.all_agree(self._has_room(wanted, work_before)) and self._exchange_units(wanted)):
            self._failure = "a rank has too little memory for them"
            self._take_back()
        return frozenset(self._held)

    @contextmanager
    def ordinary_shards(self) -> Iterator[None]:
        """Context in which every rank holds its own units. Collective over the group, at the beginning and the end."""
        held = dict(self._held)
        self._take_back()
        try:
            yield
        finally:
            if not self._exchange_units(held):
                self._take_back()

    def _has_room(self, wanted: Arrangement, work_before: float) -> bool:
        more = taken = own = 0
        for number, after in wanted.items():
            block = self._blocks[number]
            count = unit_count(after[self._rank])
            held = unit_count(self._held[number][self._rank]) if number in self._held else block.units
            more += max(0, count - max(held, block.units)) * block.elements_per_unit
            taken += max(0, count - block.units) * block.elements_per_unit
            own += block.units * block.elements_per_unit
        if not more:
            return True
        more_work = max(0.0, taken / own - work_before)
        try:
            check_room(self._blocks[0].parameters[0][0].device, BYTES_PER_PARAMETER * more, more_work)
        except RuntimeError:
            return False
        return True

    def _take_back(self) -> None:
        if not self._exchange_units({}):
            raise RuntimeError(
                "a rank has too little memory to take back units that it has permanently re-sharded; use smaller "
                "batches, or BalanceConfig(reshard_after=None)"
            )

    def _exchange_units(self, wanted: Arrangement) -> bool:
        """Let ranks hold ``wanted``; False if it does not fit, where blocks may have the old or the new shards."""
        changed = [number for number in sorted(self.possible) if wanted.get(number) != self._held.get(number)]
        if not changed:
            return True
        self._memory.prepare()
        contents = "\n".join(line for number in changed for line in self._mover.contents(self._blocks[number]))
        if not self._exchange.all_equal(zlib.crc32(contents.encode())):
            raise RuntimeError(
                "the ranks of a tensor-parallel group keep different things of their units (gradients, optimizer "
                "state, or types), so units cannot change their rank; all ranks must take the same steps. To migrate "
                "units without moving them for good, set BalanceConfig(reshard_after=None)"
            )
        for number in changed:
            block = self._blocks[number]
            ordinary = holdings(block.units, self._ranks, ())
            after = wanted.get(number, ordinary)
            if not self._mover.move(block, self._held.get(number, ordinary), after):
                return False
            if after == ordinary:
                self._held.pop(number, None)
                block.hold(None)
            else:
                self._held[number] = after
                block.hold(after[self._rank])
        return True


def _shared_parameters(model: nn.Module) -> frozenset[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return frozenset(shared)
