"""Balancing between iterations: measure which ranks are slow, decide on a plan, apply the plan.

:mod:`.decide` has pure functions without torch. :mod:`.measure` reads clocks and measures costs. :mod:`.report`
describes what happened. The modules of this folder apply plans: :mod:`.balancer` runs once per optimizer step,
:mod:`.apply` gives layers their workloads, :mod:`.resharding` moves units for good, :mod:`.host_messages` exchanges
numbers between ranks.
"""

from .config import BalanceConfig
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
    "RankTimes",
    "decide",
    "divide",
    "layer_ratios",
    "predicted_seconds",
    "resize_ratios",
]
