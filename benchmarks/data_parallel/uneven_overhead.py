"""The cost of fitted batches when all ranks are equal: iteration time relative to Colossal-AI's own plugins.

python -m benchmarks.data_parallel.uneven_overhead [--stages 0 1 2] [--rounds 12]

Stage 0 is compared with ``TorchDDPPlugin``, stages 1 and 2 with ``LowLevelZeroPlugin``, at the same global batch. The
control is a second model with the plain plugin in the same processes. Aim: at most 1.02. Our plugin measures the ranks
before and during training. The column of samples shows how it divides the batch among equal ranks.
"""

from __future__ import annotations

import math

from benchmarks.common import make_vit, print_table, read_options, start_ranks, take_turns
from benchmarks.data_parallel.turns import Turns, digits

# isort: split
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase

from colossal_hetero import BatchConfig, HeteroZeroPlugin

HIDDEN, DEPTH, PATCH, SAMPLES = 256, 4, 8, 64


def plain_plugin(stage: int) -> DPPluginBase:
    return TorchDDPPlugin() if stage == 0 else LowLevelZeroPlugin(stage=stage, precision="fp32")


def main() -> None:
    arguments = read_options(__doc__, stages=(0, 1, 2), rounds=12)
    start_ranks(2)
    data = digits()
    rows = []
    for stage in arguments.stages:
        # The plugin as users run it, with its check at the end of an epoch, and with equal parts, whatever it measured.
        fitted = BatchConfig(global_batch_size=SAMPLES)
        equal = BatchConfig(global_batch_size=SAMPLES, method="uniform", reallocate_above=math.inf)
        plugins: dict[str, tuple[DPPluginBase, int | None]] = {
            "plain": (plain_plugin(stage), SAMPLES // 2),
            "plain again": (plain_plugin(stage), SAMPLES // 2),
            "fitted": (HeteroZeroPlugin(stage, batches=fitted), None),
            "fitted, equal parts": (HeteroZeroPlugin(stage, batches=equal), None),
        }
        variants = [
            Turns(name, plugin, make_vit(HIDDEN, DEPTH, PATCH), data, size) for name, (plugin, size) in plugins.items()
        ]
        take_turns(variants, warmup=6, rounds=arguments.rounds, block=4)
        for variant in variants:
            ratio = variant.median_seconds / variants[0].median_seconds
            rows.append((stage, variant.name, variant.median_seconds, ratio, variant.division))
    columns = ("stage", "variant", "iteration [s]", "ratio", "samples by rank")
    title = (
        f"No straggler, relative to Colossal-AI's plugins (2 ranks): ViT, {HIDDEN} wide, "
        f"{DEPTH} deep, patch {PATCH}, {SAMPLES} samples per iteration, AdamW, fp32"
    )
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
