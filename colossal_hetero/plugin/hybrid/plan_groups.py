"""The process groups of a plan, each over the network that its members share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ...pipeline_parallel.communicators import make_group
from ...planner.cluster.group_networks import Adapter, group_network, process_environment
from ...planner.cluster.topology import Topology
from ...planner.plans.plan import Plan
from .planned_mesh import MakeGroup, ordered_group

__all__ = ["groups_of", "name_adapters"]


def groups_of(plan: Plan, topology: Topology, adapters: Mapping[str, Adapter] | None = None) -> MakeGroup:
    """What makes groups of the ranks that run ``plan``: tensor-parallel ones in a node, data-parallel ones over RDMA
    where all members have it, pipelines over what crosses clusters (Holmes, section 3).

    Args:
        plan: with ranks numbered as the devices of ``topology``, not yet as launched.
        adapters: of this rank's node, by kind of NIC.

    Raises:
        ValueError: the plan has devices that ``topology`` has not.
    """
    devices = sorted(rank for replica in plan.rank_order for group in replica for rank in group)
    if devices[-1] >= len(topology.devices):
        raise ValueError(
            f"the plan has device {devices[-1]}, but the cluster's are 0 to {len(topology.devices) - 1}; "
            "give the cluster that was planned for"
        )

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
        backend: Any = dist.get_backend()
        try:
            network = group_network(topology, [devices[rank] for rank in ranks])
        except ValueError:
            # A pipeline's last stage need not reach its first.
            return ordered_group(ranks)
        if network.backend != backend:
            # The ranks were launched on other hardware than planned for, or with a backend of the user's choice.
            if backend not in ("gloo", "nccl"):
                return ordered_group(ranks)
            network = dataclasses.replace(network, backend=backend, nccl_net=None)
        return make_group(ranks, network, adapters=adapters, new_group=ordered_group)

    return group_of


def name_adapters(adapters: Mapping[str, Adapter] | None) -> None:
    """Tell NCCL what this node calls its NICs, where the process's environment does not say.

    NCCL reads it once, with the first communicator of the process, so this comes before any of the plan's groups.
    """
    for name, value in process_environment(adapters or {}).items():
        os.environ.setdefault(name, value)
