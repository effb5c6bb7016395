"""Balancing between iterations: measure which ranks are slow, decide on a plan, apply the plan.

:mod:`.decide` has pure functions without torch. :mod:`.measure` reads clocks and measures costs. :mod:`.report`
describes what happened. The modules of this folder apply plans: :mod:`.balancer` runs once per optimizer step,
:mod:`.apply` gives layers their workloads, :mod:`.resharding` moves units for good, :mod:`.host_messages` exchanges
numbers between ranks.
"""

from .config import BalanceConfig
from .decide.costs import Costs, predicted_seconds
from .decide.divide import Division, Move, divide
from .decide.modes import decide
from .decide.plan import BalancePlan, RankTimes
from .decide.ratios import layer_ratios, resize_ratios

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
