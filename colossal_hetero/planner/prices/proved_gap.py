"""How much faster than a plan any other plan can be, by lower bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile
from ..search.settings import slots_to_try
from .node_choice import node_types
from .time_bounds import time_bounds

__all__ = ["proved_gap"]


def proved_gap(
    topology: Topology,
    profile: ModelProfile,
    iteration_seconds: float,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    tensor_parallel: Sequence[int] | None = None,
) -> float:
    """No 1F1B plan takes less than ``iteration_seconds / (1 + gap)``, without overlapped communication.

    Args:
        topology: Machines; plans may leave some out.
        profile: See :func:`.make_plans.make_plans`, as are ``global_batch``, ``micro_batches`` and ``tensor_parallel``.
        iteration_seconds: Of a plan.
    """
    known, pools, *_ = slots_to_try(topology, profile, global_batch, micro_batches, tensor_parallel)
    types = node_types(known)
    # With more nodes, no bound is larger. So that of all nodes holds for every choice.
    everything = np.array([[len(each.nodes) for each in types]])
    bound = float(time_bounds(known, pools, types, everything)[0])
    return max(iteration_seconds / bound - 1.0, 0.0)
