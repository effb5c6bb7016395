"""Time of one resized layer or block, forward and backward, relative to Colossal-AI's dense layers.

python -m benchmarks.tensor_parallel.layer [--rounds 15] [--dtype float32] [--device cpu]

The layer has M = 4160 rows, 2048 inputs and 1024 outputs; the block is an MLP with 1024 inputs and 2048 hidden
neurons. The rank is alone in its group, so nothing is communicated. The times include the selection of columns or
units, once per iteration as in training.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import print_table, start_ranks  # prepares Colossal-AI
from colossal_hetero.balance.pruning import make_selector
from colossal_hetero.layers import HeteroLinear1D_Col, HeteroLinear1D_Row, Workload
from colossal_hetero.layers.block import Block, BlockWorkload
from colossal_hetero.layers.unit_layout import UnitPlace
from colossal_hetero.layers.workload import kept_count

# isort: split
from colossalai.shardformer.layer import Linear1D_Col, Linear1D_Row

ROWS, INPUTS, OUTPUTS = 4160, 2048, 1024
BLOCK_INPUTS, HIDDEN = 1024, 2048
RATIOS = (0.25, 0.5, 0.75, 0.9)
RULES = ("random", "priority", "norm-product")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    start_ranks(1)
    where = {"dtype": getattr(torch, arguments.dtype), "device": arguments.device}
    x = torch.randn(ROWS, INPUTS, **where).requires_grad_()
    gradient = torch.randn(ROWS, OUTPUTS, **where)

    def build(cls: type) -> nn.Module:
        return cls.from_native_module(nn.Linear(INPUTS, OUTPUTS, **where), process_group=dist.group.WORLD)

    layers: dict[tuple[str, float], nn.Module] = {
        ("dense", 0.0): build(Linear1D_Col),
        ("idle", 0.0): build(HeteroLinear1D_Col),
    }
    for rule in RULES:
        for ratio in RATIOS:
            layer = build(HeteroLinear1D_Col)
            layer.assign(Workload(prune=ratio, select=make_selector(rule, layer.matrix, seed=0)))
            layers[rule, ratio] = layer

    def seconds(layer: nn.Module) -> float:
        x.grad = layer.weight.grad = None
        if isinstance(layer, HeteroLinear1D_Col):
            layer.begin_iteration()
        _synchronize(arguments.device)
        start = time.perf_counter()
        layer(x).backward(gradient)
        _synchronize(arguments.device)
        return time.perf_counter() - start

    def build_block(pair: tuple[type, type]) -> nn.Sequential:
        first, second = (nn.Linear(BLOCK_INPUTS, HIDDEN, **where), nn.Linear(HIDDEN, BLOCK_INPUTS, **where))
        group = dist.group.WORLD
        parts = (
            cls.from_native_module(layer, process_group=group) for cls, layer in zip(pair, (first, second), strict=True)
        )
        return nn.Sequential(*parts).insert(1, nn.ReLU())

    blocks: dict[tuple[str, float], nn.Sequential] = {
        ("dense", 0.0): build_block((Linear1D_Col, Linear1D_Row)),
        ("idle", 0.0): build_block((HeteroLinear1D_Col, HeteroLinear1D_Row)),
    }
    workloads: dict[tuple[str, float], Block] = {}
    for rule in RULES:
        for ratio in RATIOS:
            mlp = build_block((HeteroLinear1D_Col, HeteroLinear1D_Row))
            in_rows, in_columns = UnitPlace(0, 1, HIDDEN, 1), UnitPlace(1, 1, HIDDEN, 1)
            block = Block("mlp", [mlp[0]], mlp[2], [[in_rows, in_rows], [in_columns]], None, ())
            select = make_selector(rule, block.matrices[1], seed=0)
            block.assign(BlockWorkload(kept=kept_count(HIDDEN, ratio), select=select))
            blocks[rule, ratio], workloads[rule, ratio] = mlp, block
    block_x = torch.randn(ROWS, BLOCK_INPUTS, **where).requires_grad_()
    block_gradient = torch.randn(ROWS, BLOCK_INPUTS, **where)

    def block_seconds(key: tuple[str, float]) -> float:
        block_x.grad = None
        blocks[key].zero_grad()
        if key in workloads:
            workloads[key].begin_iteration()
        _synchronize(arguments.device)
        start = time.perf_counter()
        blocks[key](block_x).backward(block_gradient)
        _synchronize(arguments.device)
        return time.perf_counter() - start

    for title, measure, keys, room in (
        ("One layer, columns", lambda key: seconds(layers[key]), list(layers), 0.08),
        ("One block, units", block_seconds, list(blocks), 0.03),
    ):
        times: dict[tuple[str, float], list[float]] = {key: [] for key in keys}
        for number in range(arguments.rounds + 2):
            for key in keys:
                taken = measure(key)
                if number >= 2:
                    times[key].append(taken)
        medians = {key: median(values) for key, values in times.items()}
        dense = medians["dense", 0.0]
        rows = [("idle", 0.0, 1.0, medians["idle", 0.0] / dense, 1.02)]
        rows += [
            (rule, ratio, 1 - ratio, medians[rule, ratio] / dense, 1 - ratio + room)
            for rule in RULES
            for ratio in RATIOS
        ]
        where_text = f"{arguments.dtype} on {arguments.device}"
        title = f"{title}, forward + backward, {where_text}; dense {dense * 1e3:.1f} ms"
        print_table(title, ("chosen by", "ratio γ", "1 − γ", "time / dense", "aim ≤"), rows)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
