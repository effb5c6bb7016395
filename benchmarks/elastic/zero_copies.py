"""What the second holder of each shard costs in elastic training with ZeRO 1, while nothing happens.

    python -m benchmarks.elastic.zero_copies [--ranks 3,4] [--micro-batches 4,16] [--rounds 5]

Ranks that share this machine's cores train a GPT-2 with AdamW in fp32, each as a replica, with one holder of each shard
and with two, in turns in the same processes. The control is the way with one holder once more. Aim: at most 1.02.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
import transformers

from benchmarks.common import describe_machine, print_table
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

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            iterate(run)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(ITERATIONS):
                iterate(run)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / ITERATIONS)
    return {name: median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="3", help="ranks, each a replica (default: %(default)s)")
    parser.add_argument("--micro-batches", default="16", help="of each rank, per iteration (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: %(default)s)")
    arguments = parser.parse_args()
    rows = []
    for ranks in map(int, arguments.ranks.split(",")):
        for count in map(int, arguments.micro_batches.split(",")):
            found = run_ranks(ranks, measure, ranks, count, arguments.rounds, timeout_seconds=600)[0]
            ratios = [f"{found[name] / found['one']:.3f}" for name in HOLDERS]
            rows.append((ranks, count * SAMPLES * TOKENS, f"{found['one'] * 1000:.0f}", *ratios[1:]))
    print(describe_machine())
    columns = ["ranks", "tokens of a rank", "one holder [ms]", *(f"{name} (ratio)" for name in [*HOLDERS][1:])]
    print_table("ZeRO 1 with two holders of each shard; aim: ≤ 1.02", columns, rows)


if __name__ == "__main__":
    main()
