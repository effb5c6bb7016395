"""The process groups of a plan, each over the network that its members share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ...gpu_over_gloo import support_gpus_over_gloo
from ...pipeline_parallel.communicators import make_group
from ...planner.cluster.group_networks import Adapter, Network, group_network, process_environment
from ...planner.cluster.topology import Topology
from ...planner.plans.plan import Plan
from .planned_mesh import MakeGroup, ordered_group

__all__ = ["plan_groups", "set_adapter_variables", "usable_network"]


def plan_groups(plan: Plan, topology: Topology, adapters: Mapping[str, Adapter] | None = None) -> MakeGroup:
    """A function that makes a process group of any ranks that run ``plan``, over the network that they share.

    Tensor-parallel groups use the links within a node, data-parallel groups RDMA if all members have it, and pipelines
    what crosses clusters (Holmes, section 3).

    Args:
        plan: with ranks numbered like the devices of ``topology``, not yet as launched.
        adapters: the network adapters of this rank's node, by kind of NIC.

    Raises:
        ValueError: the plan has a device that is not in ``topology``.
    """
    devices = sorted(rank for replica in plan.rank_order for group in replica for rank in group)
    if devices[-1] >= len(topology.devices):
        raise ValueError(
            f"the plan has device {devices[-1]}, but the cluster has devices 0 to {len(topology.devices) - 1}; "
            "give the cluster that the plan was made for"
        )

    def group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
        try:
            network = group_network(topology, [devices[rank] for rank in ranks])
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
    """``network`` as ranks can use it whose default group has this ``backend``; None if it is not known how.

    With ``cpu:gloo,cuda:nccl``, GPUs use NCCL among themselves, and Gloo in groups with a CPU. With one backend for all
    devices, the ranks run on other hardware than in the plan, or the user chose it; then all groups use it.
    """
    if backend == network.backend or {"cpu:gloo", "cuda:nccl"} <= set(backend.split(",")):
        return network
    if backend in ("gloo", "nccl"):
        return dataclasses.replace(network, backend=backend, nccl_net=None)  # type: ignore[arg-type]
    return None


def set_adapter_variables(adapters: Mapping[str, Adapter] | None) -> None:
    """Set NCCL's environment variables for the names of this node's NICs, unless the user has set them.

    NCCL reads them once, when it makes the first communicator of the process, so this comes before the plan's groups.
    """
    for name, value in process_environment(adapters or {}).items():
        os.environ.setdefault(name, value)
