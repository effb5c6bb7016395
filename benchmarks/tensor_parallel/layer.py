"""Time of one resized layer or block, forward and backward, relative to Colossal-AI's dense layers.

python -m benchmarks.tensor_parallel.layer [--rounds 15]

The layer has M = 4160 rows, 2048 inputs and 1024 outputs; the block is an MLP with 1024 inputs and 2048 hidden
neurons. The rank is alone in its group, so nothing is communicated. The times include the selection of columns or
units, once per iteration as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import medians_in_turns, print_table, read_options, start_ranks  # prepares Colossal-AI
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
Key = tuple[str, float]


def make(cls: type, inputs: int, outputs: int) -> nn.Module:
    return cls.from_native_module(nn.Linear(inputs, outputs), process_group=dist.group.WORLD)  # type: ignore[attr-defined]


def make_mlp(first: type, second: type) -> nn.Sequential:
    return nn.Sequential(make(first, BLOCK_INPUTS, HIDDEN), nn.ReLU(), make(second, HIDDEN, BLOCK_INPUTS))


def layers() -> Iterator[tuple[Key, nn.Module, Callable[[], None]]]:
    """Layers by rule and ratio, and what begins an iteration."""
    yield ("dense", 0.0), make(Linear1D_Col, INPUTS, OUTPUTS), lambda: None
    for rule, ratio in [("idle", 0.0), *((rule, ratio) for rule in RULES for ratio in RATIOS)]:
        layer = make(HeteroLinear1D_Col, INPUTS, OUTPUTS)
        if ratio:
            layer.assign(Workload(prune=ratio, select=make_selector(rule, layer.matrix, seed=0)))
        yield (rule, ratio), layer, layer.begin_iteration


def blocks() -> Iterator[tuple[Key, nn.Module, Callable[[], None]]]:
    """MLPs by rule and ratio, and what begins an iteration."""
    yield ("dense", 0.0), make_mlp(Linear1D_Col, Linear1D_Row), lambda: None
    yield ("idle", 0.0), make_mlp(HeteroLinear1D_Col, HeteroLinear1D_Row), lambda: None
    for rule in RULES:
        for ratio in RATIOS:
            mlp = make_mlp(HeteroLinear1D_Col, HeteroLinear1D_Row)
            in_rows, in_columns = UnitPlace(0, 1, HIDDEN, 1), UnitPlace(1, 1, HIDDEN, 1)
            block = Block("mlp", [mlp[0]], mlp[2], [[in_rows, in_rows], [in_columns]], None, ())
            select = make_selector(rule, block.matrices[1], seed=0)
            block.assign(BlockWorkload(kept=kept_count(HIDDEN, ratio), select=select))
            yield (rule, ratio), mlp, block.begin_iteration


def timed(model: nn.Module, begin: Callable[[], None], inputs: int, outputs: int) -> Callable[[], float]:
    x, gradient = torch.randn(ROWS, inputs).requires_grad_(), torch.randn(ROWS, outputs)

    def seconds() -> float:
        x.grad = None
        model.zero_grad()
        begin()
        start = time.perf_counter()
        model(x).backward(gradient)
        return time.perf_counter() - start

    return seconds


def main() -> None:
    arguments = read_options(__doc__, rounds=15)
    start_ranks(1)
    for title, models, sizes, room in (
        ("One layer, columns", layers(), (INPUTS, OUTPUTS), 0.08),
        ("One block, units", blocks(), (BLOCK_INPUTS, BLOCK_INPUTS), 0.03),
    ):
        functions = {key: timed(model, begin, *sizes) for key, model, begin in models}
        found = medians_in_turns(functions, arguments.rounds, warmup=2)
        dense = found.pop(("dense", 0.0))
        rows = [
            (rule, ratio, 1 - ratio, seconds / dense, 1 - ratio + (room if ratio else 0.02))
            for (rule, ratio), seconds in found.items()
        ]
        title = f"{title}, forward + backward; dense {dense * 1e3:.1f} ms"
        print_table(title, ("chosen by", "ratio γ", "1 − γ", "time / dense", "aim ≤"), rows)


if __name__ == "__main__":
    main()
