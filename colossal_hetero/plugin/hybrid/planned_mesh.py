"""A mesh of process groups in which any rank may take any place.

Colossal-AI's mesh puts rank r at position r, where the last axis varies fastest. A plan chooses which rank is which
stage of which replica. Here the positions of the mesh stay the same, and each position is given a rank.

Within a group, ranks keep the order of their positions, so that a rank's number in its group is its coordinate. Much
of Colossal-AI relies on this: samplers use the number in the data-parallel group as the index of the replica, number 0
writes checkpoints, and a tensor-parallel layer holds the part with its number, whose gradients are summed with those at
the same coordinate.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh
from torch.distributed import distributed_c10d

from ...processes.group_destruction import world_timeout

__all__ = ["PlannedMesh", "ordered_group", "planned_mesh"]

MakeGroup = Callable[[Sequence[int]], dist.ProcessGroup]


class PlannedMesh(ProcessGroupMesh):
    """``ProcessGroupMesh`` with a given rank at each position.

    Args:
        size: sizes of the axes.
        ranks: the rank at each position; positions are numbered as in ``numpy.ravel_multi_index``.
        make_group: makes a group of ranks in which they are numbered in the given order; called by all ranks for all
            groups.

    Raises:
        ValueError: ``ranks`` is not a permutation of all ranks.
    """

    def __init__(self, *size: int, ranks: Sequence[int], make_group: MakeGroup | None = None) -> None:
        super().__init__(*size)
        world = dist.get_world_size()
        if sorted(ranks) != list(range(world)):
            raise ValueError(f"ranks={list(ranks)} must hold each of the {world} ranks 0 to {world - 1} once")
        self._ranks = tuple(int(rank) for rank in ranks)
        self._make_group = make_group or ordered_group
        # From here on, what the parent class calls a rank is a position.
        self._rank = self._ranks.index(dist.get_rank())
        self._coord = ProcessGroupMesh.unravel(self._rank, self._shape)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._ranks[self._rank]

    def unravel(self, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinate of ``rank``."""
        return ProcessGroupMesh.unravel(self._ranks.index(rank), shape)

    def ravel(self, coord: tuple[int, ...], shape: tuple[int, ...], mode: str = "raise") -> int:
        """The rank at ``coord``; ``mode`` as in the parent class."""
        return self._ranks[ProcessGroupMesh.ravel(coord, shape, mode)]

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        """The ranks of ``group``, in the order of their coordinates."""
        return [self._ranks[position] for position in super().get_ranks_in_group(group)]

    def _get_group(self, ranks_in_group: Iterable[int], backend: str | None = None) -> dist.ProcessGroup:
        """The group of these positions, made if it does not exist. (The parent class calls positions ranks.)"""
        positions = tuple(sorted(ranks_in_group))
        if positions not in self._ranks_to_group:
            ranks = [self._ranks[position] for position in positions]
            group = self._make_group(ranks) if backend is None else ordered_group(ranks, backend=backend)
            self._ranks_to_group[positions] = group
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._group_to_ranks[group] = positions
        return self._ranks_to_group[positions]


def ordered_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """``torch.distributed.new_group`` with these ``options``, whose members are numbered in the order of ``ranks``.

    Raises:
        RuntimeError: this version of torch sorts the ranks in a way that is not prevented here.
    """
    can_keep = "sort_ranks" in inspect.signature(dist.new_group).parameters
    options.setdefault("timeout", world_timeout())
    with nullcontext() if can_keep else _unsorted_ranks():
        group = dist.new_group(list(ranks), **options, **({"sort_ranks": False} if can_keep else {}))
    if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_process_group_ranks(group) != list(ranks):
        raise RuntimeError(f"torch {torch.__version__} does not keep the order of ranks {list(ranks)} in a group")
    return group


@contextmanager
def _unsorted_ranks() -> Iterator[None]:
    """Let ``new_group`` keep the order of ranks: older versions of torch sort them and have no argument to prevent it.

    The module calls the built-in ``sorted``; a module-level name ``sorted`` hides the built-in.
    """
    distributed_c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del distributed_c10d.sorted  # type: ignore[attr-defined]


@contextmanager
def planned_mesh(
    rank_order: Sequence[Sequence[Sequence[int]]], dp_outside: bool, make_group: MakeGroup | None = None
) -> Iterator[None]:
    """Let hybrid-parallel plugins that are constructed inside have a :class:`PlannedMesh`.

    Args:
        rank_order: ranks by replica, stage and place in the tensor-parallel group.
        dp_outside: the plugin's argument: the first two axes of the mesh are (replica, stage) if true, otherwise
            (stage, replica).
        make_group: see :class:`PlannedMesh`.
    """
    order = np.asarray(rank_order)
    ranks = order if dp_outside else order.swapaxes(0, 1)
    original: Any = hybrid_parallel_plugin.ProcessGroupMesh
    hybrid_parallel_plugin.ProcessGroupMesh = partial(PlannedMesh, ranks=ranks.ravel().tolist(), make_group=make_group)
    try:
        yield
    finally:
        hybrid_parallel_plugin.ProcessGroupMesh = original
