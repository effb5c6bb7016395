"""SEMI's vision transformers forward and backward on a GPU, whole and as one shard of eight, and resized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.apply import Applier
from colossal_hetero.colossalai_support.accelerator import get_accelerator
from colossal_hetero.layers import hetero_layers, hetero_policy
from colossal_hetero.layers.block import attach_blocks
from colossal_hetero.layers.transport import Transport

from ..part import Case, Machine, Part, Row
from ..ranks import run_ranks
from ..timing import seconds_in_turns
from ..training.vit_shard import VitShard, with_parallel_layers

__all__ = ["PART"]

ABOUT = """
Forward and backward pass in bf16 without an optimizer, on one rank that communicates with nobody. *One shard of 8* is a
model whose blocks have an eighth of the heads and hidden units. Batches are the paper's (64 images for ViT-1B, 32 for
ViT-3B; 64 patches each), with which launching kernels takes much of the time of a shard, and eight times as large ones.
γ is the pruned share of each block's units, or of each product's columns, which are chosen anew in each iteration by
the default rule; the choice is part of the time. The values of γ take turns; times are medians. TFLOP/s count the
products and the attention that are left in the blocks; an H100 reaches 798 in a dense bf16 product of 8192³. Peak
memory is that without pruning. There is no aim, because what lies between the blocks' products shrinks less or not at
all.
"""

RATIOS = (0.0, 0.25, 0.5, 0.75)
MODELS = (
    # name, shards, images, memory in bytes
    ("vit-1b", 8, 64, 12 << 30),
    ("vit-1b", 8, 512, 48 << 30),
    ("vit-3b", 8, 32, 20 << 30),
    ("vit-3b", 8, 256, 48 << 30),
    ("vit-1b", 1, 64, 32 << 30),
)
"""Memory includes the whole model in fp32, from which a shard is made."""


def cases(machine: Machine) -> Sequence[Case]:
    found = []
    for name, shards, images, memory in MODELS:
        if machine.is_tiny and images != 64:
            continue  # one case for a shard, and one for a whole model
        shard = VitShard.of(name, shards, machine.is_tiny)
        measure = partial(_measure, machine, shard, 2 if machine.is_tiny else images)
        title = f"{name}, {'whole' if shards == 1 else f'one shard of {shards}'}, {images} images"
        found.append(Case(title, measure, memory_bytes=memory))
    return found


def _measure(machine: Machine, shard: VitShard, images: int) -> list[Row]:
    return run_ranks(machine, 1, iteration_rows, shard, images, 1 if machine.is_tiny else 10)[0]


def iteration_rows(device: torch.device, shard: VitShard, images: int, rounds: int) -> list[Row]:
    """For both forms and each γ: milliseconds of an iteration, and a note with speed and memory.

    Runs on a rank that is alone in ``torch.distributed``.
    """
    return [
        (f"{form}, γ = {ratio:g}", *cells)
        for form in ("units", "columns")
        for ratio, cells in _times(device, shard, images, form, rounds).items()
    ]


def _times(
    device: torch.device, shard: VitShard, images: int, form: str, rounds: int
) -> dict[float, tuple[float, str]]:
    dtype = torch.bfloat16
    whole = shard.build(device, dtype)
    model = with_parallel_layers(whole, hetero_policy(whole))
    blocks = attach_blocks(model) if form == "units" else []
    config = BalanceConfig(mode="resize", pruning=Pruning(resizing="block" if blocks else "column"))
    applier = Applier(hetero_layers(model), blocks, config, 100, Transport(dist.group.WORLD))  # type: ignore[arg-type]
    x, labels = shard.batch(images, device, dtype)

    def iterate() -> None:
        applier.units.begin_pass()
        F.cross_entropy(model(x).float(), labels).backward()
        applier.units.before_step()
        model.zero_grad()
        applier.end_iteration()

    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()
    iterate()
    peak = get_accelerator().max_memory_allocated()
    times: dict[float, list[float]] = {ratio: [] for ratio in RATIOS}
    left = {}
    for _ in range(rounds):
        for ratio in RATIOS:
            applier.prune(ratio)
            left[ratio] = applier.shares.load
            times[ratio].append(seconds_in_turns({"": iterate}, device, rounds=1, warmup=1, calls=2)[""])
    seconds = {ratio: median(times[ratio]) for ratio in RATIOS}
    found = {}
    for ratio in RATIOS:
        speed = left[ratio] * shard.flop(images) / seconds[ratio] / 1e12
        words = f"{seconds[ratio] / seconds[0.0]:.3f} of γ = 0, for {left[ratio]:.0%} of the products"
        found[ratio] = 1e3 * seconds[ratio], f"{words}; {speed:.1f} TFLOP/s; peak {peak / 2**30:.2f} GiB"
    return found


PART = Part("models", ABOUT, ("case", "pruned", "iteration [ms]", "note"), cases)
