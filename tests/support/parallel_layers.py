"""The seven kinds of parallel layers, ours and Colossal-AI's, made from the same weights, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer import layer as theirs
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import colossal_hetero.layers as ours

IN, OUT = 24, 36  # divisible by 2, 3 and 4; not powers of two
KINDS = {
    "Linear1D_Col": (ours.HeteroLinear1D_Col, theirs.Linear1D_Col),
    "Linear1D_Row": (ours.HeteroLinear1D_Row, theirs.Linear1D_Row),
    "FusedLinear1D_Col": (ours.HeteroFusedLinear1D_Col, theirs.FusedLinear1D_Col),
    "FusedLinear1D_Row": (ours.HeteroFusedLinear1D_Row, theirs.FusedLinear1D_Row),
    "GPT2FusedLinearConv1D_Col": (ours.HeteroGPT2FusedLinearConv1D_Col, theirs.GPT2FusedLinearConv1D_Col),
    "GPT2FusedLinearConv1D_Row": (ours.HeteroGPT2FusedLinearConv1D_Row, theirs.GPT2FusedLinearConv1D_Row),
    "VocabParallelLMHead1D_Col": (ours.HeteroVocabParallelLMHead1D, theirs.VocabParallelLMHead1D),
}
"""Our class and Colossal-AI's class of each kind of layer."""


def native(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    module = Conv1D(OUT, IN) if kind.startswith("GPT2") else nn.Linear(IN, OUT)
    module.bias.data.uniform_(-1, 1)
    return module.to(dtype)


def options(kind: str) -> dict[str, Any]:
    if kind in ("FusedLinear1D_Col", "GPT2FusedLinearConv1D_Col"):
        return {"split_sizes": [OUT // 3] * 3}
    if kind == "FusedLinear1D_Row":
        return {"split_sizes": [IN // 2] * 2}
    if kind == "VocabParallelLMHead1D_Col":
        return {"make_vocab_size_divisible_by": 1}
    return {}


def build(cls: type, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    return cls.from_native_module(native(kind, dtype), process_group=dist.group.WORLD, **options(kind), **more)


def split_indices(sizes: list[int], rank: int, world: int) -> Tensor:
    """The features of a fused dimension that belong to ``rank``: its share of each part."""
    parts, start = [], 0
    for size in sizes:
        share = size // world
        parts.append(torch.arange(start + rank * share, start + (rank + 1) * share))
        start += size
    return torch.cat(parts)


def owned(kind: str, rank: int, world: int) -> Tensor:
    """Indices of the outputs (column-parallel) or inputs (row-parallel) that ``rank`` owns."""
    size = OUT if kind.endswith("Col") else IN
    return split_indices(options(kind).get("split_sizes", [size]), rank, world)


def inputs(
    kind: str, rank: int, world: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole input, this rank's part of it, and the whole gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, IN, generator=generator).to(dtype)
    dy = torch.randn(2, 5, OUT, generator=generator).to(dtype)
    x_local = x if kind.endswith("Col") else x[..., owned(kind, rank, world)].contiguous()
    return x, x_local, dy
