"""Train tiny language models through ``Booster.boost``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

from colossal_hetero.balance import BalancePlan
from tests.support.sharding import randomize
from tests.support.training import Trained

VOCABULARY = 101
LENGTH = 12
SAMPLES = 3


def gpt2(layers: int = 2, **options: object) -> nn.Module:
    """GPT-2 without dropout. Its embedding and head have one weight unless ``tie_word_embeddings`` is False."""
    sizes = dict(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=48, n_layer=layers, n_head=12)
    drops = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager")
    return randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**(sizes | drops | options))))


def llama(layers: int = 2, **options: object) -> nn.Module:
    """Llama with two query heads for each key/value head."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=60, num_hidden_layers=layers)
    heads = dict(num_attention_heads=24, num_key_value_heads=12)
    # With sequence parallelism and torch's own attention, Colossal-AI's Llama leaves the causal mask out.
    causal = dict(attn_implementation="eager")
    return randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | heads | causal | options))))


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama}


def tokens(number: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Token numbers and labels ``[SAMPLES, length]``, int64, of the batch with this number; some labels are ignored."""
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randint(0, VOCABULARY, (SAMPLES, length), generator=generator)
    labels = inputs.clone()
    labels[0, -3:] = -100
    return inputs, labels


def train_on_tokens(run: Trained, iterations: int, accumulation: int = 1) -> Trained:
    """Continue ``run``; each iteration has its own batches."""
    for _ in range(iterations):
        total = 0.0
        for micro in range(accumulation):
            inputs, labels = tokens(len(run.losses) * accumulation + micro)
            loss = run.model(input_ids=inputs, attention_mask=torch.ones_like(inputs), labels=labels)["loss"]
            run.booster.backward(loss / accumulation, run.optimizer)
            total += loss.item() / accumulation
        run.finish()
        run.losses.append(total)
    return run


def plan_of(sender: int, ranks: int, share: float = 0.5) -> BalancePlan:
    """A plan in which rank ``sender`` gives ``share`` of its work to the other ranks."""
    return BalancePlan(
        resize=(0.0,) * ranks,
        migrate=tuple(share if rank == sender else 0.0 for rank in range(ranks)),
        receive=tuple(0.0 if rank == sender else share / (ranks - 1) for rank in range(ranks)),
    )
