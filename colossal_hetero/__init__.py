"""Colossal-AI training on devices that are not equally fast.

The public names are loaded on first use, so that the parts that only plan and decide start without torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "BalanceConfig",
    "BatchConfig",
    "CheckpointConfig",
    "ElasticConfig",
    "HeteroHybridParallelPlugin",
    "HeteroZeroPlugin",
    "PlanConfig",
    "Pruning",
]

_HOMES = {
    "BalanceConfig": "colossal_hetero.balance.config",
    "BatchConfig": "colossal_hetero.data_parallel.config",
    "CheckpointConfig": "colossal_hetero.checkpoint.config",
    "ElasticConfig": "colossal_hetero.elastic.config",
    "HeteroHybridParallelPlugin": "colossal_hetero.plugin.hybrid.hybrid_plugin",
    "HeteroZeroPlugin": "colossal_hetero.plugin.zero.zero_plugin",
    "PlanConfig": "colossal_hetero.plugin.plan_config",
    "Pruning": "colossal_hetero.balance.config",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
