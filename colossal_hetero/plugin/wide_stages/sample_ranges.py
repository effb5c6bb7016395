"""Which samples of a micro-batch each group of a stage computes, and which groups of two stages send to each other.

A stage of width w has w tensor-parallel groups. Group g computes the samples from ``⌊n·g/w⌋`` to ``⌊n·(g+1)/w⌋`` of a
micro-batch of n. Training has equal groups, because the width divides the micro-batch. In an evaluation the last
micro-batch may be smaller.

[Note: messages between widths] Between two stages each pair of groups with samples in common sends these samples, and
nothing else: activations one way and their gradients back. Ranks at the same place in their groups send to each other.
A rank goes through its pairs in the order of the other group. So all pairs of a cut are in one order, that of (group
before, group behind), and no rank waits in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GroupPlace", "first_too_narrow", "lane", "micro_batch_sizes", "overlaps", "place_of", "sample_range"]

Groups = Sequence[Sequence[int]]
"""Of a stage: ranks by group and place in the group."""


def sample_range(samples: int, width: int, group: int) -> range:
    """The samples of a micro-batch of so many that this group of a stage computes."""
    return range(samples * group // width, samples * (group + 1) // width)


def overlaps(samples: int, width: int, group: int, other_width: int) -> list[tuple[int, range]]:
    """The groups of a neighboring stage that have samples of this ``group`` of a stage, in their order.

    Returns:
        The number of each such group, and which of this group's samples they are, counted from its first one.
    """
    own = sample_range(samples, width, group)
    found = []
    for other in range(other_width):
        theirs = sample_range(samples, other_width, other)
        start, stop = max(own.start, theirs.start), min(own.stop, theirs.stop)
        if start < stop:
            found.append((other, range(start - own.start, stop - own.start)))
    return found


def micro_batch_sizes(samples: int, micro_batch: int) -> tuple[int, ...]:
    """Samples of each micro-batch of a batch; the last one may be smaller."""
    return tuple(min(micro_batch, samples - start) for start in range(0, samples, micro_batch))


def first_too_narrow(sizes: Sequence[int], widths: Sequence[int]) -> int | None:
    """The first stage in which a group would have no sample of a micro-batch; None if there is none."""
    smallest = min(sizes)
    return next((stage for stage, width in enumerate(widths) if width > smallest), None)


@dataclass(frozen=True)
class GroupPlace:
    """Where a rank is in a replica, and the ranks at the same place in the groups of its own and the next stages."""

    widths: tuple[int, ...]
    """Of all stages of the replica."""
    stage: int
    group: int
    """Number of its group in the stage."""
    columns: tuple[tuple[int, ...], ...]
    """By stage and group, the ranks at the same place in their tensor-parallel groups."""

    @property
    def width(self) -> int:
        """Of this rank's stage."""
        return self.widths[self.stage]

    @property
    def is_divided(self) -> bool:
        """Whether a stage of the replica has several groups."""
        return max(self.widths) > 1


def place_of(replica: Sequence[Groups], rank: int) -> GroupPlace:
    """Where ``rank`` is.

    Args:
        replica: ranks by stage, group, and place in the tensor-parallel group.
    """
    stage, group, column = next(
        (stage, number, group.index(rank))
        for stage, groups in enumerate(replica)
        for number, group in enumerate(groups)
        if rank in group
    )
    columns = tuple(tuple(group[column] for group in groups) for groups in replica)
    return GroupPlace(tuple(map(len, replica)), stage, group, columns)


def lane(replica: Sequence[Groups], group: int) -> tuple[tuple[int, ...], ...]:
    """A pipeline with one group per stage: the given one, or the last one where there are fewer.

    That is what Colossal-AI sees on the ranks of this group.
    """
    return tuple(tuple(groups[min(group, len(groups) - 1)]) for groups in replica)
