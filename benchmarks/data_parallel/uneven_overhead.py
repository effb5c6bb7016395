"""The cost of fitted batches when all ranks are equal: iteration time relative to Colossal-AI's own plugins.

python -m benchmarks.data_parallel.uneven_overhead [--stages 0 1 2] [--rounds 12]

Stage 0 is compared with ``TorchDDPPlugin``, stages 1 and 2 with ``LowLevelZeroPlugin``, at the same global batch. The
control is a second model with the plain plugin in the same processes. Aim: at most 1.02. Our plugin measures the ranks
before and during training. The column of samples shows how it divides the batch among equal ranks.
"""

from __future__ import annotations

import argparse
import math

from benchmarks.common import print_table, start_ranks, take_turns
from benchmarks.tensor_parallel.uneven import Turns, digits, make_model

# isort: split
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase

from colossal_hetero import BatchConfig, HeteroZeroPlugin


def plain_plugin(stage: int) -> DPPluginBase:
    return TorchDDPPlugin() if stage == 0 else LowLevelZeroPlugin(stage=stage, precision="fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", choices=(0, 1, 2), default=[0, 1, 2], help="stages of ZeRO")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=4, help="timed iterations per round")
    parser.add_argument("--batch", type=int, default=64, help="samples per iteration, over both ranks")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--patch", type=int, default=8)
    arguments = parser.parse_args()
    start_ranks(2)
    data = digits()
    shape = (arguments.hidden, arguments.depth, arguments.patch)
    rows = []
    for stage in arguments.stages:
        variants = [
            Turns("plain", plain_plugin(stage), make_model(*shape), data, arguments.batch // 2),
            Turns("plain again", plain_plugin(stage), make_model(*shape), data, arguments.batch // 2),
            # The plugin as users run it, with its check at the end of an epoch.
            Turns(
                "fitted",
                HeteroZeroPlugin(stage, batches=BatchConfig(global_batch_size=arguments.batch)),
                make_model(*shape),
                data,
                None,
            ),
            # The same plugin with equal parts, whatever it measured.
            Turns(
                "fitted, equal parts",
                HeteroZeroPlugin(
                    stage,
                    batches=BatchConfig(global_batch_size=arguments.batch, method="uniform", reallocate_above=math.inf),
                ),
                make_model(*shape),
                data,
                None,
            ),
        ]
        take_turns(variants, warmup=6, rounds=arguments.rounds, block=arguments.block)
        for variant in variants:
            ratio = variant.median_seconds / variants[0].median_seconds
            rows.append((stage, variant.name, variant.median_seconds, ratio, variant.division))
    columns = ("stage", "variant", "iteration [s]", "ratio", "samples by rank")
    title = (
        f"No straggler, relative to Colossal-AI's plugins (2 ranks): ViT, {arguments.hidden} wide, "
        f"{arguments.depth} deep, patch {arguments.patch}, {arguments.batch} samples per iteration, AdamW, fp32"
    )
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
