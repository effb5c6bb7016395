"""Balancing between iterations: measure which ranks are slow, decide on a plan, apply it. :mod:`.balancer` runs once
per optimizer step, :mod:`.modes` decides, :mod:`.apply` and :mod:`.resharding` carry plans out."""

from .config import BalanceConfig, Pruning
from .divide import Division, Move, divide
from .modes import decide
from .plan import BalancePlan, Costs, RankTimes, predicted_seconds
from .ratios import layer_ratios, resize_ratios

__all__ = [
    "BalanceConfig",
    "BalancePlan",
    "Costs",
    "Division",
    "Move",
    "Pruning",
    "RankTimes",
    "decide",
    "divide",
    "layer_ratios",
    "predicted_seconds",
    "resize_ratios",
]
