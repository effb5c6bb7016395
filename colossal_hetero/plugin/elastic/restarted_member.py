"""This process as a worker of torchrun, which starts all workers again when members come or go."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import TCPStore

from ...accelerator import get_accelerator
from ...elastic.config import ElasticConfig
from ...elastic.membership.colossalai_state import LaunchedState
from ...elastic.membership.process_groups import ProcessGroups
from ...elastic.membership.world import World
from ...elastic.restart.handshake import find_each_other
from ...elastic.restart.torchrun_place import TorchrunPlace
from ...planner.cluster.topology import Topology
from .joining.new_kinds import own_kind

__all__ = ["RestartedMember"]

SEED = 1024
"""As in ``colossalai.launch``."""


class RestartedMember:
    """A worker of torchrun in the only world of its life.

    Args:
        config: the user's options.
        cluster: all nodes that may be members; ranks are in their order, so they differ from torchrun's.

    Raises:
        ValueError: torchrun has not started this process, or on a node that is not in the cluster.
    """

    board = None
    """Workers of torchrun have no place for messages that outlives them."""

    def __init__(self, config: ElasticConfig, cluster: Topology) -> None:
        self._config, self._order = config, {node.name: number for number, node in enumerate(cluster.nodes)}
        self.place = TorchrunPlace.from_environ()
        self.kind = own_kind(cluster, self.place.node, self.place.local_rank)
        """The kind of this process's device in the cluster."""

    @property
    def job(self) -> str:
        """A name that no other job on this node has."""
        return self.place.job

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.place.node

    def form(self) -> Sequence[str]:
        """Connect the workers that torchrun has started; returns the node of each rank.

        Raises:
            ValueError: there are fewer workers than ``min_members``.
            RuntimeError: a worker has ended meanwhile.
        """
        place, config = self.place, self._config
        if place.world_size < config.min_members:
            raise ValueError(
                f"torchrun has started {place.world_size} workers, fewer than min_members={config.min_members}; give "
                "torchrun --nnodes MIN:MAX with a higher MIN, or set min_members lower"
            )
        store = TCPStore(place.host, place.port, is_master=place.hosts_store, wait_for_workers=False)
        limit = config.join_seconds
        found = find_each_other(store, place.rank, place.world_size, place.node, limit)  # type: ignore[arg-type]
        order = sorted(range(place.world_size), key=lambda rank: (self._number(found.nodes[rank]), rank))
        nodes = tuple(found.nodes[rank] for rank in order)
        world = World(order.index(place.rank), place.world_size, 0, nodes)
        backend = get_accelerator().communication_backend
        groups = ProcessGroups(config.timeout_seconds)
        groups.initialize(dist.PrefixStore(f"colossal_hetero/{found.token}", store), world, backend)
        LaunchedState(place.host, place.port, SEED).enter(world)
        return nodes

    def _number(self, node: str) -> int:
        return self._order.get(node, len(self._order))

    def seal(self) -> None:
        """All groups of this world exist."""

    def fail(self, reason: str) -> None:
        """The others notice that the connections to this process are closed."""

    def is_broken(self) -> bool:
        """When a process ends, torchrun ends the others."""
        return False

    def leave(self) -> None:
        """The groups end with the process."""

    def is_somebody_waiting(self) -> bool:
        """torchrun looks for processes that join."""
        return False

    def depart(self) -> None:
        """The groups end with the process."""

    def end_job(self) -> None:
        """torchrun notices that its workers have ended."""

    def is_leaving(self) -> bool:
        """What SIGTERM means only torchrun knows: all of its workers get it whenever it starts them again."""
        return False
