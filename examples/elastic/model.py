"""The model that the elastic example trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from examples.common.vit import build_vit
from examples.elastic.options import ElasticOptions

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def make_model(options: ElasticOptions, classes: int) -> Any:
    """The model with its first parameters, the same in every process."""
    torch.manual_seed(options.seed)
    return build_vit(classes, **options.vit_sizes).to(DTYPES[options.precision])


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of ``logits [B, classes]`` for ``batch``, images and labels ``[B]``."""
    return cross_entropy(logits, batch[1])
