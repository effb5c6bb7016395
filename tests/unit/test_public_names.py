"""The public names of version 0.1 can still be imported from the same modules."""

from __future__ import annotations

from importlib import import_module

import pytest

NAMES_OF_0_1 = {
    "colossal_hetero": ["BalanceConfig", "BatchConfig", "HeteroHybridParallelPlugin", "HeteroZeroPlugin", "PlanConfig"],
    "colossal_hetero.layers": [
        "HeteroFusedLinear1D_Col",
        "HeteroFusedLinear1D_Row",
        "HeteroGPT2FusedLinearConv1D_Col",
        "HeteroGPT2FusedLinearConv1D_Row",
        "HeteroLinear1D_Col",
        "HeteroLinear1D_Row",
        "TimmViTPolicy",
        "Workload",
        "hetero_layers",
        "hetero_policy",
    ],
    "colossal_hetero.balance": [
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
    ],
    "colossal_hetero.planner": ["Allocation", "Curve", "Share", "allocate"],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES_OF_0_1.items() for name in names]
)
def test_a_public_name_of_0_1_can_be_imported(module: str, name: str) -> None:
    assert callable(getattr(import_module(module), name))
