"""Dropout on activations that every rank of a tensor-parallel group holds in full.

Colossal-AI's policies for BERT, BLIP-2, GPT-2, GPT-J and T5 draw it separately on each rank
(``DropoutForParallelInput``). Then the ranks' activations differ, so a unit gives another result on another rank, and
parameters that all ranks hold get different gradients.
"""

from __future__ import annotations

import torch.distributed as dist
from colossalai.shardformer.layer import DropoutForParallelInput, DropoutForReplicatedInput
from colossalai.shardformer.layer.utils import Randomizer
from torch import nn

__all__ = ["draw_residual_dropout_equally"]

_RESIDUAL: dict[str, tuple[str, ...]] = {
    "BertForMultipleChoice": ("dropout",),
    "BertForSequenceClassification": ("dropout",),
    "BertForTokenClassification": ("dropout",),
    "BertOutput": ("dropout",),
    "BertSelfOutput": ("dropout",),
    "Blip2QFormerModel": ("dropout",),
    "Blip2QFormerOutput": ("dropout",),
    "Blip2QFormerSelfOutput": ("dropout",),
    "GPT2Attention": ("resid_dropout",),
    "GPT2ForTokenClassification": ("dropout",),
    "GPT2MLP": ("dropout",),
    "GPT2Model": ("drop",),
    "GPTJAttention": ("resid_dropout",),
    "GPTJMLP": ("dropout",),
    "GPTJModel": ("drop",),
    "T5ForTokenClassification": ("dropout",),
    "T5LayerCrossAttention": ("dropout",),
    "T5LayerFF": ("dropout",),
    "T5LayerSelfAttention": ("dropout",),
    "T5Stack": ("dropout",),
}
"""The attributes that hold such dropout, by the class of ``transformers``."""


def draw_residual_dropout_equally(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let all ranks of the tensor-parallel ``group`` draw the masks of such dropout that its first rank draws.

    Changes the dropout modules of ``model``. Nothing is sent.
    """
    for module in model.modules():
        names = {name for kind in type(module).__mro__ for name in _RESIDUAL.get(kind.__name__, ())}
        for dropout in (getattr(module, name, None) for name in sorted(names)):
            if isinstance(dropout, DropoutForParallelInput):
                # Colossal-AI adds the rank to the seed.
                dropout.randomizer = Randomizer(dropout.randomizer.seed - dist.get_rank(group))
                dropout.__class__ = DropoutForReplicatedInput
