"""Optimizers that ZeRO can shard: each rank gets a flat part of every parameter, gradient and state. That is exact
only for optimizers that update each element on its own. Others look at norms of whole tensors (LAMB, LARS), at rows and
columns (Adafactor, CAME), at whole matrices (Muon, GaLore, Shampoo) or at all gradients (Prodigy), and would train to
other weights without an error."""

from __future__ import annotations

from typing import Any

import timm.optim
from colossalai.nn.optimizer import CPUAdam, FusedAdam, FusedSGD, HybridAdam, Lamb
from torch import optim

from ...profiling.preserved_state import inner_optimizer

ELEMENTWISE = {
    *(optim.Adadelta, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD, CPUAdam, FusedAdam, FusedSGD, HybridAdam, timm.optim.Lion),
}
"""Optimizers that update each element of a parameter from its own gradients alone. Other classes say so by an attribute
``is_elementwise = True``."""


def can_be_sharded(optimizer: Any, distributed: bool) -> bool:
    """True if ``optimizer`` is known to update each element on its own; Colossal-AI's ``Lamb`` is, if ``distributed``,
    replaced by one for shards."""
    kind = type(inner_optimizer(optimizer))
    return kind in ELEMENTWISE or vars(kind).get("is_elementwise") is True or (distributed and kind is Lamb)


def check_sharding(optimizer: Any, option: str, stage: int, distributed: bool) -> None:
    if not can_be_sharded(optimizer, distributed):
        name = type(inner_optimizer(optimizer)).__name__
        raise ValueError(
            f"{name} cannot be sharded by ZeRO ({option}={stage}), because it is not known to update each element of a "
            f"parameter from its own gradients alone, and each rank has a part of it; use {option}=0, or an optimizer "
            f"such as AdamW. If {name} does update each element on its own, set {name}.is_elementwise = True"
        )
