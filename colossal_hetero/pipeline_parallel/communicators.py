"""Communicators that use the network which their group has, see :mod:`..planner.networks`.

torch makes NCCL's communicator with the first collective of a group, not with the group, so that is forced here while
the group's environment is set. Communicators that torch makes later for the same group (between two ranks that send to
each other) still know the network by its name, which lies in the group's options too, unless the process has
``NCCL_NET`` in its environment, which goes before. A default group that is bound to a device splits its communicator
instead of making new ones; Colossal-AI does not bind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..planner.cluster.group_networks import Adapter, Network, group_network
from ..planner.cluster.topology import Topology

__all__ = ["environment", "group_maker", "make_group"]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside, and restore what was before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def make_group(
    ranks: Sequence[int],
    network: Network,
    *,
    adapters: Mapping[str, Adapter] | None = None,
    timeout: timedelta | None = None,
    new_group: Callable[..., Any] = dist.new_group,
) -> Any:
    """A process group over ``network``, its communicator made; ``GroupMember.NON_GROUP_MEMBER`` on other ranks.

    All ranks of the world call this for all groups, in the same order, whether they are members or not.

    Args:
        ranks: of the world.
        adapters: of this rank's node, by kind of NIC; they may differ between nodes.
        timeout: of the group's operations; None is the backend's default.
        new_group: what makes the group, if it is not torch's function: takes ``ranks``, ``backend`` and, if there are
            any, ``timeout`` and ``pg_options``.

    Raises:
        RuntimeError: no way to the other members in this network, as the backend says.
    """
    given = {"timeout": timeout, "pg_options": _options(network)}
    options = {name: value for name, value in given.items() if value is not None}
    with environment(network.environment(adapters)):
        group = new_group(list(ranks), backend=network.backend, **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            connect(group, network.backend)
    return group


def group_maker(
    topology: Topology,
    adapters: Mapping[str, Adapter] | None = None,
    new_group: Callable[..., Any] = dist.new_group,
) -> Callable[[Sequence[int]], Any]:
    """:func:`make_group` of any ranks, over the network that the topology has for them; ranks are its devices.

    A mesh whose groups are in the order of their coordinates passes its own ``new_group``.
    """

    def make(ranks: Sequence[int]) -> Any:
        return make_group(ranks, group_network(topology, ranks), adapters=adapters, new_group=new_group)

    return make


def connect(group: dist.ProcessGroup, backend: str) -> None:
    """Make the communicator now, by a first tiny sum among the members."""
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=group)
    size = dist.get_world_size(group)
    if total.item() != size:
        raise RuntimeError(f"a sum of ones over {size} ranks gave {total.item()}; their {backend} network is broken")


def _options(network: Network) -> Any:
    if network.backend != "nccl" or network.nccl_net is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    config: Any = getattr(options, "config", None)
    # Older versions of torch know it only from the environment.
    if hasattr(config, "net_name"):
        config.net_name = network.nccl_net
    return options
