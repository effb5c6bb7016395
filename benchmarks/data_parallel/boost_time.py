"""How long ``booster.boost`` takes, with and without a profile file of an earlier run.

python -m benchmarks.data_parallel.boost_time [--stages 0 1 2 3] [--rounds 3]

Aim: at most 4 s, and at most 0.5 s with a profile of an earlier run. The control is ``booster.boost`` of Colossal-AI's
plugin for the same stage, which measures nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import print_table, start_ranks
from benchmarks.tensor_parallel.uneven import digits, make_model

# isort: split
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase

from colossal_hetero import BatchConfig, HeteroZeroPlugin


def seconds_of(plugin: DPPluginBase, batch: int | None, shape: tuple[int, int, int]) -> tuple[float, int]:
    """Seconds of ``boost`` on the slowest rank, and the number of the model's parameters."""
    model = make_model(*shape)
    parameters = sum(value.numel() for value in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    loader = plugin.prepare_dataloader(digits(), **({} if batch is None else {"batch_size": batch}))
    dist.barrier()
    begin = time.perf_counter()
    Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader)
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2, 3), default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="samples per iteration, over both ranks")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--patch", type=int, default=8)
    arguments = parser.parse_args()
    start_ranks(2)
    shape = (arguments.hidden, arguments.depth, arguments.patch)
    rows = []
    for stage in arguments.stages:
        measured, again, plain = [], [], []
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as own:
                folders = [own]
                dist.broadcast_object_list(folders)
                for seconds in (measured, again):
                    plugin = HeteroZeroPlugin(
                        stage,
                        batches=BatchConfig(global_batch_size=arguments.batch, profile=f"{folders[0]}/profile.json"),
                    )
                    spent, parameters = seconds_of(plugin, None, shape)
                    seconds.append(spent)
                dist.barrier()
            if stage < 3:
                control = TorchDDPPlugin() if stage == 0 else LowLevelZeroPlugin(stage=stage, precision="fp32")
                plain.append(seconds_of(control, arguments.batch // 2, shape)[0])
        rows.append((stage, median(measured), median(again), median(plain) if plain else "-"))
    print_table(
        f"Seconds of boost (2 ranks): ViT with {parameters:,} parameters, global batch {arguments.batch}, AdamW, fp32",
        ("stage", "measured [s]", "earlier profile [s]", "Colossal-AI's plugin [s]"),
        rows,
        [f"Medians of {arguments.rounds} rounds, on the slower rank."],
    )


if __name__ == "__main__":
    main()
