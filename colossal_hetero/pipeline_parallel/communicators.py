"""Process groups that communicate over a given network; see :mod:`colossal_hetero.planner.cluster.group_networks`.

torch makes NCCL's communicator in the first collective of a group, not together with the group. So the first collective
runs here, while the environment variables of the network are set. torch may make further communicators for the same
group later, for two ranks that send to each other. They use the same network, because its name is in the options of the
group too, unless ``NCCL_NET`` is set in the environment of the process, which has precedence. If the default group were
bound to a device, torch would split its communicator instead of making new ones; Colossal-AI does not bind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..planner.cluster.group_networks import Adapter, Network

__all__ = ["environment", "make_group"]


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context, and restore the old values afterwards."""
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
    """A process group over ``network`` with its communicator; ``GroupMember.NON_GROUP_MEMBER`` on other ranks.

    All ranks call this for all groups, in the same order, whether they are members or not.

    Args:
        ranks: global ranks of the members.
        network: the network that the group uses.
        adapters: network adapters of this rank's node, by kind of NIC; they may differ between nodes.
        timeout: for the group's operations; None for the backend's default.
        new_group: function that makes the group: takes ``ranks``, ``backend`` and, if they are given, ``timeout`` and
            ``pg_options``.

    Raises:
        RuntimeError: the backend cannot reach the other members over this network.
    """
    given = {"timeout": timeout, "pg_options": _options(network)}
    options = {name: value for name, value in given.items() if value is not None}
    with environment(network.environment(adapters)):
        group = new_group(list(ranks), backend=network.backend, **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            connect(group, network.backend)
    return group


def connect(group: dist.ProcessGroup, backend: str) -> None:
    """Make the communicator now, by summing one number over the members."""
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
    # Older versions of torch take the network only from the environment.
    if hasattr(config, "net_name"):
        config.net_name = network.nccl_net
    return options
