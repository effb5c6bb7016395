"""Costs of a model's blocks in a stage with recomputation, or with a divided optimizer state.

[Note: costs of a stage]

- Recomputation. A block keeps only its input (the first one: as much as it sends). The backward pass runs the forward
  pass again, and then all activations of one block exist for a moment. If the last block, which has the head, needs
  more for this moment than the others, the rest counts like its activations, as in ``layer_profile.py``.
- ZeRO stage 1. Of ``state_factor`` bytes per byte of parameters, one is the parameters and one their gradients. A
  device keeps, and updates, one of ``zero_shards`` equal parts of the rest, the optimizer's state. In fp32, ZeRO also
  copies its part of the parameters. Reduce-scatter and all-gather together send what a ring all-reduce sends
  (Rajbhandari et al., ZeRO, 2020, section 7.2.1).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .layer_costs import LayerCosts
from .layer_profile import ModelProfile

__all__ = ["stage_costs"]

WHOLE_FACTOR = 2.0
"""Bytes of parameters and gradients per byte of parameters, which ZeRO stage 1 does not divide."""


def stage_costs(
    profile: ModelProfile,
    device: str,
    *,
    tensor_parallel: int,
    micro_batch: int,
    speed: float = 1.0,
    recompute: bool = False,
    zero_shards: int = 1,
) -> LayerCosts:
    """Costs per block, ``[blocks]``, and device of a stage of this form; see [Note: costs of a stage].

    Equal arguments return the same object; without recomputation and shards, that of :meth:`.ModelProfile.costs`.
    """
    if zero_shards < 1:
        raise ValueError(f"zero_shards={zero_shards}: must be at least 1")
    costs = profile.costs(device, tensor_parallel, micro_batch, speed)
    if recompute:
        costs = profile.remembered((costs, "recompute"), lambda: _recomputed(costs))
    if zero_shards > 1:
        whole = costs
        costs = profile.remembered((whole, "shards", zero_shards), lambda: _divided(whole, profile, zero_shards))
    return costs


def _recomputed(costs: LayerCosts) -> LayerCosts:
    activations, outputs = costs.activation_bytes, costs.output_bytes
    kept = np.concatenate([outputs[:1], outputs[:-1]])
    for_a_moment = float(activations[: max(len(activations) - 1, 1)].max())
    kept[-1] += max(float(activations[-1]) - for_a_moment, 0.0)
    return dataclasses.replace(
        costs,
        backward_seconds=costs.backward_seconds + costs.forward_seconds,
        activation_bytes=kept,
        temporary_bytes=costs.temporary_bytes + for_a_moment,
    )


def _divided(costs: LayerCosts, profile: ModelProfile, shards: int) -> LayerCosts:
    factor = profile.state_factor
    copies = 1.0 if profile.precision == "fp32" and not profile.master_copies else 0.0
    divided = max(factor - WHOLE_FACTOR, 0.0) + copies
    return dataclasses.replace(
        costs,
        state_bytes=costs.state_bytes * (min(factor, WHOLE_FACTOR) + divided / shards) / factor,
        update_seconds=costs.update_seconds / shards,
    )
