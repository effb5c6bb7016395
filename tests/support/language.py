"""Train a small GPT-2 through ``Booster.boost``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.support.training import Trained

VOCABULARY = 768  # a multiple of 64 · ranks, so that embeddings are not padded


def gpt2(seed: int = 0, **options: Any) -> transformers.GPT2LMHeadModel:
    """A small GPT-2, by default with dropout of 0.1 in attention, after it, after MLPs and after the embedding."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=VOCABULARY, n_positions=8, n_embd=24, n_layer=2, n_head=12, n_inner=60)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | options)))


def tokens(number: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(number))


def train_gpt2(run: Trained, steps: int, each: Callable[[int], None] = lambda step: None) -> Trained:
    for step in range(steps):
        ids = tokens(step % 4)
        loss = run.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.losses.append(loss.item())
        each(step)
    return run
