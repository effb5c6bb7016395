"""What the second holder of each shard costs in elastic training with ZeRO 1, while nothing happens.

    python -m benchmarks.elastic.zero_copies [--ranks 3 4] [--micro-batches 4 16] [--rounds 5]

Ranks that share this machine's cores train a GPT-2 with AdamW in fp32, each as a replica, with one holder of each shard
and with two, in turns in the same processes. The control is the way with one holder once more. Aim: at most 1.02.
"""

from __future__ import annotations

from functools import partial

import torch
import transformers

from benchmarks.common import medians_in_turns, print_table, read_options, steady_seconds
from colossal_hetero import PlanConfig
from tests.parallel.plugin.unequal.test_unequal_replicas import exact_zero, loss_of
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, unequal_plan
from tests.support.training import Trained, boost

HOLDERS = {"one": 1, "one, again": 1, "two": 2}
WIDTH, LAYERS, TOKENS, SAMPLES, ITERATIONS = 256, 4, 64, 2, 3
"""Of the model, of a sample, of a micro-batch, and of a turn."""


def make_run(ranks: int, micro_batches: int, holders: int) -> Trained:
    plan = unequal_plan(*(make_plan([[[rank]]], [LAYERS], SAMPLES, micro_batches) for rank in range(ranks)))
    plugin = exact_zero(plan, zero_stage=1, max_norm=1.0, planning=PlanConfig(layer_sums=True))
    plugin._unequal.shard_copies = holders
    torch.manual_seed(0)
    sizes = dict(vocab_size=1000, n_positions=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=4)
    drops = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", use_cache=False)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    return boost(plugin, model, lambda whole: torch.optim.AdamW(whole.parameters(), lr=1e-4))


def measure(ranks: int, micro_batches: int, rounds: int) -> dict[str, float]:
    runs = {name: make_run(ranks, micro_batches, holders) for name, holders in HOLDERS.items()}
    tokens = torch.randint(1000, (SAMPLES * micro_batches, TOKENS))
    batch = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)

    def iterate(run: Trained) -> None:
        run.booster.execute_pipeline(iter([batch]), run.model, loss_of, run.optimizer, return_loss=True)
        run.optimizer.step()
        run.optimizer.zero_grad()

    functions = {name: partial(steady_seconds, partial(iterate, run), ITERATIONS) for name, run in runs.items()}
    return medians_in_turns(functions, rounds)


def main() -> None:
    arguments = read_options(__doc__, ranks=(3,), micro_batches=(16,), rounds=5)
    rows = []
    for ranks in arguments.ranks:
        for count in arguments.micro_batches:
            found = run_ranks(ranks, measure, ranks, count, arguments.rounds, timeout_seconds=600)[0]
            ratios = [f"{found[name] / found['one']:.3f}" for name in HOLDERS]
            rows.append((ranks, count * SAMPLES * TOKENS, f"{found['one'] * 1000:.0f}", *ratios[1:]))
    columns = ["ranks", "tokens of a rank", "one holder [ms]", *(f"{name} (ratio)" for name in [*HOLDERS][1:])]
    print_table("ZeRO 1 with two holders of each shard; aim: ≤ 1.02", columns, rows)


if __name__ == "__main__":
    main()
