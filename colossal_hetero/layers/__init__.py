"""Parallel linear layers that accept a workload, and policies that use them: one rank's part of the work."""

from ..colossalai_support import accelerator  # noqa: F401  (prepares Colossal-AI before the modules below import it)
from .linear import (
    HeteroFusedLinear1D_Col,
    HeteroFusedLinear1D_Row,
    HeteroGPT2FusedLinearConv1D_Col,
    HeteroGPT2FusedLinearConv1D_Row,
    HeteroLinear1D_Col,
    HeteroLinear1D_Row,
    HeteroVocabParallelLMHead1D,
    hetero_layers,
)
from .policy import hetero_policy
from .timm_vit import TimmViTPolicy
from .workload import Workload

__all__ = [
    "HeteroFusedLinear1D_Col",
    "HeteroFusedLinear1D_Row",
    "HeteroGPT2FusedLinearConv1D_Col",
    "HeteroGPT2FusedLinearConv1D_Row",
    "HeteroLinear1D_Col",
    "HeteroLinear1D_Row",
    "HeteroVocabParallelLMHead1D",
    "TimmViTPolicy",
    "Workload",
    "hetero_layers",
    "hetero_policy",
]
