"""Loaders of equal plans, unequal plans and uneven batches draw alike, and continue from each other's positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import zero_plugin
from tests.support.zero_runs import unmeasured

SIZE, GLOBAL_BATCH = 51, 8
KINDS = ("even", "planned", "unequal", "uneven", "ZeRO")


def loader_of(kind: str, seed: int | None, batch_size: int | None = None) -> Any:
    """A loader for global batches of eight samples. With a ``batch_size``, every rank has that many samples."""
    options: dict[str, Any] = dict(shuffle=True, drop_last=True, **({} if seed is None else {"seed": seed}))
    data: Any = list(range(SIZE))
    if kind == "even":
        plugin: Any = HeteroHybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32")
        return plugin.prepare_dataloader(data, batch_size or GLOBAL_BATCH // dist.get_world_size(), **options)
    if batch_size is not None:
        options["batch_size"] = batch_size
    if kind in ("planned", "unequal"):
        counts = (2, 2) if kind == "planned" else (3, 1)
        replicas = [make_plan([[[rank]]], [2], micro_batches=count) for rank, count in enumerate(counts)]
        return planned(unequal_plan(*replicas)).prepare_dataloader(data, **options)
    if kind == "uneven":
        config = BatchConfig(global_batch_size=GLOBAL_BATCH)
        plugin = HeteroHybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32", batches=config)
    else:
        plugin = zero_plugin(1, GLOBAL_BATCH)
    loader = plugin.prepare_dataloader(data, **options)
    if batch_size is not None:
        return loader
    loader.divide_by(lambda samples: [[samples - 3], [3]])
    return loader


def draw(loader: Any, epoch: int, stop: int | None = None) -> list[list[int]]:
    """The samples of this rank in each global batch, as the loop of the documentation draws them."""
    loader.set_epoch(epoch)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if hasattr(loader, "finish_global_batch"):
            loader.finish_global_batch()
        assert loader.is_last
        if len(found) == stop:
            break
    return found


@unmeasured
def draw_each() -> list[tuple[str, list[list[int]]]]:
    found = []
    for seed in (None, 7):
        states = {}
        for kind in KINDS:
            for batch_size in (None, GLOBAL_BATCH // dist.get_world_size()):
                loader = loader_of(kind, seed, batch_size)
                assert loader.seed == (seed or 0)
                found.append((f"{kind}, seed {seed}, batch size {batch_size}", draw(loader, 3)))
            draw(loader := loader_of(kind, seed), 3, stop=2)
            states[kind] = loader.state_dict()
        for before, state in states.items():
            for after in KINDS:
                loader = loader_of(after, seed)
                loader.load_state_dict(state)
                found.append((f"{before} to {after}, seed {seed}, resumed", draw(loader, 3)))
        with pytest.raises(ValueError, match="seed was"):
            loader_of("even", 5).load_state_dict(states["ZeRO"])
    return found


def test_all_loaders_draw_alike_and_continue_from_each_other() -> None:
    for cases in zip(*run_ranks(2, draw_each), strict=True):
        name = cases[0][0]
        seed = 0 if "seed None" in name else 7
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed + 3)).tolist()
        expected = [
            set(order[first : first + GLOBAL_BATCH]) for first in range(0, SIZE - GLOBAL_BATCH + 1, GLOBAL_BATCH)
        ]
        global_batches = [set().union(*parts) for parts in zip(*(batches for _, batches in cases), strict=True)]
        assert global_batches == expected[2 if "resumed" in name else 0 :], name
