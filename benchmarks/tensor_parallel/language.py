"""Language models with one rank under a CPU quota: what ``auto`` gains, and that it trains the same.

sudo python -m benchmarks.tensor_parallel.language [--quota 0.25] [--rounds 6] [--models gpt2 llama]

A GPT-2 with its usual dropout of 0.1 and a Llama, both with a vocabulary of 8,192, are trained by two ranks on random
tokens with a pattern. Each model is trained on the same batches with the same random numbers: without a quota, in modes
``off`` and ``auto``; and with rank 1 under the quota, in both modes in turn. Reported are the times, and the largest
difference of a loss from the run without a quota in the same mode. Losses of the two modes differ if there is dropout,
because ``auto`` draws other masks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.common import Variant, print_table, quota_on, read_options, start_ranks, take_turns
from colossal_hetero import BalanceConfig

# isort: split
from colossalai.shardformer.layer.utils import Randomizer

VOCABULARY = 8192
HIDDEN, DEPTH, HEADS = 384, 4, 8
LONGEST_CONTEXT = 1024
BLOCK = 4
MODES = ("off", "auto")


def gpt2() -> torch.nn.Module:
    sizes = dict(n_positions=LONGEST_CONTEXT, n_embd=HIDDEN, n_layer=DEPTH, n_head=HEADS, vocab_size=VOCABULARY)
    # Colossal-AI 0.5 forgets the causal mask with transformers' default, sdpa.
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", use_cache=False))


def llama() -> torch.nn.Module:
    sizes = dict(hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=DEPTH, vocab_size=VOCABULARY)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=LONGEST_CONTEXT)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"gpt2": gpt2, "llama": llama}


class LanguageVariant(Variant):
    """A language model in training; iteration ``i`` of each variant has the same tokens and random numbers."""

    def __init__(
        self, make: Callable[[], torch.nn.Module], name: str, balance: BalanceConfig, batch_size: int, context: int
    ) -> None:
        # At 1e-3, training is chaotic: a relative change of a weight by 1e-7 changes losses by 0.1 after 30 iterations.
        super().__init__(name, balance, learning_rate=1e-4)
        self._make = make
        self._batch_size, self._context = batch_size, context
        self.losses: list[float] = []

    def make_model(self) -> torch.nn.Module:
        # Each dropout module of Colossal-AI gets its seed from a counter in the process.
        Randomizer.reset_index()
        return self._make()

    def loss(self) -> torch.Tensor:
        number = len(self.losses)
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(VOCABULARY, (self._batch_size, 1), generator=generator)
        tokens = (start + 7 * torch.arange(self._context)) % VOCABULARY
        torch.manual_seed(number)
        # Colossal-AI needs the mask, although it hides no token.
        loss = self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
        self.losses.append(loss.item())
        return loss


def measure(make: Callable[[], torch.nn.Module], arguments: argparse.Namespace) -> list[tuple[Any, ...]]:
    def variant_of(name: str, mode: Any) -> LanguageVariant:
        return LanguageVariant(make, name, BalanceConfig(mode=mode), arguments.batch_size, arguments.context)

    free = [variant_of(f"no quota, {mode}", mode) for mode in MODES]
    limited = [variant_of(mode, mode) for mode in MODES]
    for variant in (*free, *limited):
        variant.build()
    iterations = arguments.warmup + arguments.rounds * (BLOCK + 1)
    take_turns(free, warmup=iterations - 5, rounds=1, block=4)
    with quota_on(1, arguments.quota):
        take_turns(limited, warmup=arguments.warmup, rounds=arguments.rounds, block=BLOCK)
    rows = []
    for variant, reference in zip((*free, *limited), (*free, *free), strict=True):
        difference = max(abs(a - b) for a, b in zip(variant.losses, reference.losses, strict=True))
        records = variant.plugin.balancer.collect() or []
        migrated = f"{records[-1].ranks[1].migrated:.0%}" if records else ""
        seconds = variant.median_seconds
        ratio = seconds / limited[0].median_seconds
        rows.append((variant.name, seconds, ratio, migrated, variant.losses[-1], f"{difference:.1e}"))
    return rows


def main() -> None:
    arguments = read_options(__doc__, quota=0.25, models=tuple(MODELS), batch_size=8, context=256, warmup=16, rounds=6)
    start_ranks(2)
    rows = [(name, *row) for name in arguments.models for row in measure(MODELS[name], arguments)]
    columns = ("model", "variant", "iteration [s]", "/ off", "migrated", "last loss", "largest difference")
    print_table(
        f"Rank 1 of 2 under a CPU quota of {arguments.quota:g} of a core, batches of {arguments.batch_size} × "
        f"{arguments.context} tokens",
        columns,
        rows,
    )


if __name__ == "__main__":
    main()
