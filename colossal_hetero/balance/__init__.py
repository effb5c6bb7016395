"""What changes between iterations: measure, decide, apply.

The deciding half (:mod:`.config`, :mod:`.decide`, :mod:`.speed`, :mod:`.records`) is free of torch; the other half
(:mod:`.clock`, :mod:`.columns`, :mod:`.balancer`) has the effects and is imported by name.
"""

from .config import BalanceConfig
from .decide import Plan, RankTimes, decide, layer_ratios, resize_ratios

__all__ = ["BalanceConfig", "Plan", "RankTimes", "decide", "layer_ratios", "resize_ratios"]
