"""A mesh of process groups in which any rank may take any place. Colossal-AI's mesh puts rank r at position r, where
the last axis varies fastest. Here a plan gives each position a rank. Within a group, ranks keep the order of their
positions, so that a rank's number in its group is its coordinate, as Colossal-AI relies on: samplers use it as the
index of the replica, number 0 writes checkpoints, and a tensor-parallel layer holds the part with its number.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from colossalai.booster.plugin import hybrid_parallel_plugin
from colossalai.cluster import ProcessGroupMesh, process_group_mesh
from numpy.typing import ArrayLike
from torch.distributed import distributed_c10d

from ...colossalai_support.corrections import ModuleProxy, replaced
from ...colossalai_support.gpu_over_gloo import support_gpus_over_gloo
from ...common.ranks import world_timeout
from ...planner.cluster.group_networks import Adapter, Network, group_network, process_environment
from ...planner.cluster.topology import Topology

MakeGroup = Callable[[tuple[int, ...]], Any]
"""The group of these ranks, numbered in this order."""


class PlannedMesh(ProcessGroupMesh):
    """``ProcessGroupMesh`` with a given rank at each position: all ranks, or those of one replica. What the parent
    class calls a rank is a position; what it returns is a global rank. ``others``: further groups that are destroyed
    together with the mesh."""

    def __init__(
        self, *size: int, ranks: Sequence[int], make_group: MakeGroup | None = None, others: Iterable[Any] = ()
    ) -> None:
        super().__init__(*size)
        self._ranks = tuple(int(rank) for rank in ranks)
        self._make_group, self._others = make_group or ordered_group, others
        self._ranks_to_group: dict[tuple[int, ...], Any] = {}
        self._rank = self._ranks.index(dist.get_rank())
        self._coord = ProcessGroupMesh.unravel(self._rank, self._shape)

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
        positions = tuple(sorted(set(ranks_in_group)))
        if positions not in self._ranks_to_group:
            ranks = tuple(self._ranks[each] for each in positions)
            made = self._make_group(ranks) if backend is None else ordered_group(ranks, backend=backend)
            self._ranks_to_group[positions] = made
        return self._ranks_to_group[positions]

    def destroy_mesh_process_groups(self) -> None:
        # The parent class reads the values, and passes over groups that are destroyed already.
        every = [*self._ranks_to_group.values(), *self._others]
        self._ranks_to_group = {(number,): group for number, group in enumerate(every)}
        super().destroy_mesh_process_groups()


def ordered_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """``torch.distributed.new_group`` with these ``options``, whose members are numbered in the order of ``ranks``."""
    can_keep = "sort_ranks" in inspect.signature(dist.new_group).parameters
    options.setdefault("timeout", world_timeout())
    with nullcontext() if can_keep else _unsorted_ranks():
        group = dist.new_group(list(ranks), **options, **({"sort_ranks": False} if can_keep else {}))
    if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_process_group_ranks(group) != list(ranks):
        raise RuntimeError(f"torch {torch.__version__} does not keep the order of ranks {list(ranks)} in a group")
    return group


@contextmanager
def _unsorted_ranks() -> Iterator[None]:
    """Let ``new_group`` keep the order of ranks, which older versions of torch sort, without an argument to prevent it.
    A module-level name ``sorted`` hides the built-in that the module calls."""
    distributed_c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del distributed_c10d.sorted  # type: ignore[attr-defined]


@contextmanager
def planned_mesh(
    rank_order: ArrayLike, dp_outside: bool, make_group: MakeGroup | None = None, others: Iterable[Any] = ()
) -> Iterator[None]:
    """Let hybrid-parallel plugins that are constructed inside have a :class:`PlannedMesh`, and see only the ranks in
    ``rank_order``, ``[replicas, stages, tensor parallel]``: all, or those of one replica."""
    order = np.asarray(rank_order)
    ranks: list[int] = (order if dp_outside else order.swapaxes(0, 1)).ravel().tolist()
    position = ranks.index(dist.get_rank())
    mesh = partial(PlannedMesh, ranks=ranks, make_group=make_group, others=others)
    with ExitStack() as stack:
        for module in (hybrid_parallel_plugin, process_group_mesh):
            whole = module.dist
            seen = ModuleProxy(
                whole,
                get_world_size=lambda group=None: len(ranks) if group is None else dist.get_world_size(group),
                get_rank=lambda group=None: position if group is None else dist.get_rank(group),
            )
            stack.enter_context(replaced(module, dist=seen))
        stack.enter_context(replaced(hybrid_parallel_plugin, ProcessGroupMesh=mesh))
        yield


# torch makes NCCL's communicator in a group's first collective, which therefore runs here, while the environment
# variables of the network are set. Communicators that torch makes for the same group later, for two ranks that send to
# each other, use the same network, because its name is in the group's options too, unless ``NCCL_NET`` is set in the
# environment of the process. If the default group were bound to a device, torch would split its communicator instead of
# making new ones; Colossal-AI does not bind it.


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update({name: before[name] for name in before.keys() & variables.keys()})


def make_group(
    ranks: Sequence[int],
    network: Network,
    *,
    adapters: Mapping[str, Adapter] | None = None,
    new_group: Callable[..., Any] = dist.new_group,
) -> Any:
    """A process group over ``network`` with its communicator; ``GroupMember.NON_GROUP_MEMBER`` on other ranks. All
    ranks call this for all groups, in the same order."""
    options = {} if (of_backend := _options(network)) is None else {"pg_options": of_backend}
    with environment(network.environment(adapters)):
        group = new_group(list(ranks), backend=network.backend, **options)
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            return group
        total = torch.ones(1, device="cuda" if network.backend == "nccl" else "cpu")
        dist.all_reduce(total, group=group)
        if total.item() != len(ranks):
            words = f"a sum of ones over {len(ranks)} ranks gave {total.item()}; their {network.backend} network"
            raise RuntimeError(f"{words} is broken")
    return group


def _options(network: Network) -> Any:
    if network.backend != "nccl" or network.nccl_net is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    config: Any = getattr(options, "config", None)
    # Some builds of torch take the network only from the environment.
    if hasattr(config, "net_name"):
        config.net_name = network.nccl_net
    return options


def plan_groups(topology: Topology, adapters: Mapping[str, Adapter] | None = None) -> MakeGroup:
    """A function that makes process groups of ranks, the devices of ``topology``, over the network that they share:
    links within a node for tensor parallelism, RDMA for data parallelism if all members have it, and what crosses
    clusters for pipelines (Holmes, section 3)."""

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
        try:
            network = group_network(topology, ranks)
        except ValueError:
            # The first and the last stage of a pipeline share a group, but may have no link.
            return ordered_group(ranks)
        usable = usable_network(network, dist.get_backend())
        if usable is None:
            return ordered_group(ranks)
        group: dist.ProcessGroup = make_group(ranks, usable, adapters=adapters, new_group=ordered_group)
        support_gpus_over_gloo(group)
        return group

    return group_of


def usable_network(network: Network, backend: str) -> Network | None:
    """``network`` as ranks can use it whose default group has this ``backend``; None if it is not known how. With
    ``cpu:gloo,cuda:nccl``, GPUs use NCCL among themselves, and Gloo in groups with a CPU. With one backend for all, the
    hardware is not the plan's, or the user chose it; then all groups use it."""
    if backend == network.backend or {"cpu:gloo", "cuda:nccl"} <= set(backend.split(",")):
        return network
    if backend in ("gloo", "nccl"):
        return dataclasses.replace(network, backend=backend, nccl_net=None)  # type: ignore[arg-type]
    return None


def set_adapter_variables(adapters: Mapping[str, Adapter] | None) -> None:
    """Set NCCL's environment variables for the names of this node's NICs, unless the user has set them. NCCL reads them
    once, for the first communicator of the process, so this comes before the plan's groups."""
    for name, value in process_environment(adapters or {}).items():
        os.environ.setdefault(name, value)
