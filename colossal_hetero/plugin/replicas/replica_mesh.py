"""Process groups of replicas that are not alike. Colossal-AI's hybrid plugin has one mesh, in which all replicas have
the same stages. Here each rank gets the mesh of its replica, ``(1, stages, tensor parallel, 1)``. All ranks make all
groups of all replicas at once, in the same order, because making a group is collective over the world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh, process_group_mesh

from ...colossalai_support.corrections import ModuleProxy

__all__ = ["ReplicaMesh", "groups_for_messages", "make_replica_groups", "replica_mesh"]

Ranks = tuple[int, ...]
Groups = Mapping[Ranks, dist.ProcessGroup]  # by members, in the order of their numbers in the group


def groups_of(replica: Sequence[Ranks]) -> list[Ranks]:
    """Groups that Colossal-AI uses within a replica: ranks by stage and place in the tensor-parallel group."""
    groups: list[Ranks] = list(replica)
    groups += [(rank,) for stage in replica for rank in stage]
    for column in groups_for_messages(replica):
        groups.append(column)
        groups.append((column[0], column[-1]) if len(column) > 1 else column)  # stages that share weights
    groups.append(tuple(rank for stage in replica for rank in stage))
    return groups


def groups_for_messages(replica: Sequence[Ranks]) -> list[Ranks]:
    """Groups over which stages send: by place in the tensor-parallel groups, all ranks there.

    [Note: no sums beside messages] Gradients are not summed over these groups. A last stage starts sums before it sends
    its last gradients back. With NCCL, what a group does is in one order on each rank, so the stage before would wait
    for the gradients, and they for its sums.
    """
    return list(zip(*replica, strict=True))


def make_replica_groups(rank_order: Sequence[Sequence[Ranks]], make_group: Any) -> dict[Ranks, Any]:
    groups: dict[Ranks, Any] = {}
    for replica in rank_order:
        for ranks in groups_of(replica):
            if ranks not in groups:
                groups[ranks] = make_group(ranks)
    return groups


class ReplicaMesh(ProcessGroupMesh):
    """``ProcessGroupMesh`` of one replica, with groups that exist already. What the parent class calls a rank is a
    position in the replica; what it returns is a global rank."""

    def __init__(self, *size: int, ranks: Sequence[int], groups: Groups, sums: Groups) -> None:
        super().__init__(*size)
        self._ranks, self._groups, self._sums = tuple(ranks), groups, sums

    @property
    def rank(self) -> int:
        return self._ranks[self._rank]

    def unravel(self, rank: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ProcessGroupMesh.unravel(self._ranks.index(rank), shape)

    def ravel(self, coord: tuple[int, ...], shape: tuple[int, ...], mode: str = "raise") -> int:
        return self._ranks[ProcessGroupMesh.ravel(coord, shape, mode)]

    def get_ranks_in_group(self, group: dist.ProcessGroup) -> list[int]:
        return list(dist.get_process_group_ranks(group))

    def _get_group(self, ranks_in_group: Iterable[int], backend: str | None = None) -> Any:
        """Group of these positions; the parent class asks for all along an axis, also those without this rank."""
        return self._groups[tuple(self._ranks[position] for position in sorted(set(ranks_in_group)))]

    def destroy_mesh_process_groups(self) -> None:
        every = [*self._groups.items(), *self._sums.items()]
        # The parent class reads the values. Groups that it meets again are destroyed already.
        self._ranks_to_group = {(n,): group for n, (ranks, group) in enumerate(every) if self.rank in ranks}
        super().destroy_mesh_process_groups()


@contextmanager
def replica_mesh(replica: Sequence[Ranks], dp_outside: bool, groups: Groups, sums: Groups) -> Iterator[None]:
    """Let hybrid-parallel plugins that are constructed inside see only this rank's replica."""
    ranks = [rank for stage in replica for rank in stage]
    position = ranks.index(dist.get_rank())

    def seen(module: ModuleType) -> Any:
        return ModuleProxy(
            module,
            get_world_size=lambda group=None: len(ranks) if group is None else module.get_world_size(group),
            get_rank=lambda group=None: position if group is None else module.get_rank(group),
        )

    named: Any = (hybrid_parallel_plugin, process_group_mesh)
    originals = [module.dist for module in named]
    mesh: Any = hybrid_parallel_plugin.ProcessGroupMesh
    for module in named:
        module.dist = seen(module.dist)
    hybrid_parallel_plugin.ProcessGroupMesh = partial(ReplicaMesh, ranks=ranks, groups=groups, sums=sums)
    try:
        yield
    finally:
        hybrid_parallel_plugin.ProcessGroupMesh = mesh
        for module, original in zip(named, originals, strict=True):
            module.dist = original
