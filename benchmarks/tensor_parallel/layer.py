"""Time of one resized layer, forward and backward, relative to Colossal-AI's dense layer: M = 4160, K = 2048, N = 1024.

python -m benchmarks.tensor_parallel.layer [--rounds 15] [--dtype float32] [--device cpu]

The rank is alone in its group, so nothing is communicated. The times include the selection of columns, once per
iteration as in training.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import print_table, start_ranks  # prepares Colossal-AI
from colossal_hetero.balance.column_selection import make_selector
from colossal_hetero.layers import HeteroLinear1D_Col, Workload

# isort: split
from colossalai.shardformer.layer import Linear1D_Col

ROWS, INPUTS, OUTPUTS = 4160, 2048, 1024
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

    times: dict[tuple[str, float], list[float]] = {key: [] for key in layers}
    for number in range(arguments.rounds + 2):
        for key, layer in layers.items():
            taken = seconds(layer)
            if number >= 2:
                times[key].append(taken)
    medians = {key: median(values) for key, values in times.items()}
    dense = medians["dense", 0.0]
    rows = [("idle", 0.0, 1.0, medians["idle", 0.0] / dense, 1.02)]
    rows += [
        (rule, ratio, 1 - ratio, medians[rule, ratio] / dense, 1 - ratio + 0.08) for rule in RULES for ratio in RATIOS
    ]
    title = f"One layer, forward + backward, {arguments.dtype} on {arguments.device}; dense {dense * 1e3:.1f} ms"
    print_table(title, ("columns by", "ratio γ", "1 − γ", "time / dense", "aim ≤"), rows)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
