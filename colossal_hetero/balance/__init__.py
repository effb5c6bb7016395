"""What changes between iterations: measure, decide, apply.

The deciding half (:mod:`.config`, :mod:`.plan`, :mod:`.costs`, :mod:`.decide`, :mod:`.ratios`, :mod:`.semi`,
:mod:`.optimum`, :mod:`.divide`, :mod:`.speed`, :mod:`.damping`, :mod:`.records`) is free of torch; the other half
(:mod:`.clock`, :mod:`.columns`, :mod:`.pretest`, :mod:`.balancer`) has the effects and is imported by name.
"""

from .config import BalanceConfig
from .costs import Costs, predicted_seconds
from .decide import decide
from .divide import Division, Move, divide
from .plan import Plan, RankTimes
from .ratios import layer_ratios, resize_ratios

__all__ = [
    "BalanceConfig",
    "Costs",
    "Division",
    "Move",
    "Plan",
    "RankTimes",
    "decide",
    "divide",
    "layer_ratios",
    "predicted_seconds",
    "resize_ratios",
]
