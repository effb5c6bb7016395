"""What one rank computes: tensor-parallel linear layers that can be told to do less."""

from .. import accelerator  # noqa: F401  (before .linear imports Colossal-AI, whose import is noisy)
from .linear import (
    HeteroFusedLinear1D_Col,
    HeteroFusedLinear1D_Row,
    HeteroGPT2FusedLinearConv1D_Col,
    HeteroGPT2FusedLinearConv1D_Row,
    HeteroLinear1D_Col,
    HeteroLinear1D_Row,
    hetero_layers,
)
from .workload import Workload

__all__ = [
    "HeteroFusedLinear1D_Col",
    "HeteroFusedLinear1D_Row",
    "HeteroGPT2FusedLinearConv1D_Col",
    "HeteroGPT2FusedLinearConv1D_Row",
    "HeteroLinear1D_Col",
    "HeteroLinear1D_Row",
    "Workload",
    "hetero_layers",
]
