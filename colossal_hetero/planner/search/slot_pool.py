"""The slots that the devices form with one tensor-parallel degree and size of micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from .placement import NodeLinks
from .tp_groups import SlotKind

__all__ = ["SlotPool"]


@dataclass(frozen=True, eq=False)
class SlotPool:
    """The slots that the devices form with one tensor-parallel degree, timed for one size of micro-batch."""

    tensor_parallel: int
    """Devices per slot."""
    micro_batch: int
    """Samples per micro-batch."""
    kinds: tuple[SlotKind, ...]
    """In ascending order of computing power."""
    total_micro_batches: int
    """Per iteration, over all pipelines."""
    links: NodeLinks

    @property
    def slots(self) -> int:
        """How many slots there are, of all kinds."""
        return sum(len(kind.slots) for kind in self.kinds)
