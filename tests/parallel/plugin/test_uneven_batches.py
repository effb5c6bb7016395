"""HeteroHybridParallelPlugin with uneven batches, on replicas of one or more ranks, compared with one process; and
loaders of equal plans, unequal plans and uneven batches, which draw alike and continue from each other's positions."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from colossal_hetero import BalanceConfig, BatchConfig, HeteroHybridParallelPlugin
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import CLASSES, tiny_vit, zero_plugin
from tests.support.zero_runs import fit, global_batches, sizes_by_rank, unmeasured

SAMPLES, GLOBAL_BATCH = 17, 7
STEPS = 3  # an epoch, whose last global batch has three samples


class Images(Dataset):
    images = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % CLASSES


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(Images().images).float()


@unmeasured
def train(division: list[list[int]], tp_size: int = 1, clip: float = 0.0, **options: Any) -> Tensor:
    batches = BatchConfig(global_batch_size=GLOBAL_BATCH, max_micro_batch=7)
    plugin = HeteroHybridParallelPlugin(tp_size, 1, batches=batches, **(dict(precision="fp32") | options))
    loader, model = plugin.prepare_dataloader(Images()), tiny_vit()
    model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(model, momentum(model), nn.CrossEntropyLoss(), loader)
    assert sum(share.samples for share in plugin.batch_balancer.allocation.shares) == GLOBAL_BATCH
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    steps = 0
    for images, labels in loader:
        optimizer.backward(cross_entropy(model(images).float(), labels))
        if clip:
            optimizer.clip_grad_by_norm(clip)
            if loader.current.is_last and plugin.precision == "fp16":
                with pytest.raises(RuntimeError, match="is multiplied by the loss scale"):
                    nn.utils.clip_grad_value_(model.parameters(), clip)
        optimizer.step()
        steps += loader.current.is_last
        optimizer.zero_grad()
    # The balancer of layers counts optimizer steps, not micro-batches.
    assert steps == STEPS == plugin.balancer._iteration
    return logits_of(model)


def train_alone(max_norm: float = 0.0) -> Tensor:
    model = tiny_vit()
    fit(model, momentum(model), global_batches(Images(), GLOBAL_BATCH), max_norm=max_norm)
    return logits_of(model)


@on(2, 1, [[5], [2]], "off")
@on(2, 1, [[0, 0], [4, 3]], "off")
@on(3, 1, [[2, 1], [1, 1], [1, 1]], "off")
@on(4, 2, [[4, 2], [1, 0]], "off")
@on(4, 2, [[1], [6]], "auto")
def training_equals_that_of_one_process(tp_size: int, division: list[list[int]], mode: Any) -> None:
    found = train(division, tp_size, balance=BalanceConfig(mode=mode))
    torch.testing.assert_close(found, train_alone(), rtol=1e-3, atol=1e-4)


@if_thorough(2, 1)
@on(4, 2)
def zero_in_half_precision_is_close_to_training_in_fp32(tp_size: int) -> None:
    for zero_stage in (1, 2):
        found = train([[3, 1], [2, 1]], tp_size, precision="bf16", zero_stage=zero_stage)
        torch.testing.assert_close(found, train_alone(), rtol=0.1, atol=0.1)
        assert all(torch.equal(found, other) for other in of_all_ranks(found))


@if_thorough(2, 1)
@on(4, 2)
def clipping_equals_that_of_one_process(tp_size: int) -> None:
    for tolerance, clip, options in (
        (1e-3, 0.0, dict(max_norm=0.5)),
        (1e-3, 0.5, {}),
        (0.1, 0.5, dict(precision="fp16", initial_scale=2**6)),
    ):
        found = train([[4, 1], [1, 1]], tp_size, clip, **options)
        torch.testing.assert_close(found, train_alone(0.5), rtol=tolerance, atol=tolerance / 10)


SIZE, EIGHT = 51, 8
KINDS = ("even", "planned", "unequal", "uneven", "ZeRO")


def loader_of(kind: str, seed: int | None, batch_size: int | None = None) -> Any:
    """A loader for global batches of eight samples. With a ``batch_size``, every rank has that many samples."""
    options: dict[str, Any] = dict(shuffle=True, drop_last=True, **({} if seed is None else {"seed": seed}))
    data: Any = list(range(SIZE))
    if kind == "even":
        plugin: Any = HeteroHybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32")
        return plugin.prepare_dataloader(data, batch_size or EIGHT // dist.get_world_size(), **options)
    if batch_size is not None:
        options["batch_size"] = batch_size
    if kind in ("planned", "unequal"):
        counts = (2, 2) if kind == "planned" else (3, 1)
        replicas = [make_plan([[[rank]]], [2], micro_batches=count) for rank, count in enumerate(counts)]
        return planned(unequal_plan(*replicas)).prepare_dataloader(data, **options)
    if kind == "uneven":
        config = BatchConfig(global_batch_size=EIGHT)
        plugin = HeteroHybridParallelPlugin(tp_size=1, pp_size=1, precision="fp32", batches=config)
    else:
        plugin = zero_plugin(1, EIGHT)
    loader = plugin.prepare_dataloader(data, **options)
    if batch_size is None:
        loader.divide_by(lambda samples: [[samples - 3], [3]])
    return loader


def draw(loader: Any, stop: int | None = None) -> list[list[int]]:
    loader.set_epoch(3)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if hasattr(loader, "finish_global_batch"):
            loader.finish_global_batch()
        assert loader.is_last
        if len(found) == stop:
            break
    return found


@on(2, None)
@on(2, 7)
@unmeasured
def all_loaders_draw_alike_and_continue_from_each_other(seed: int | None) -> None:
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed((seed or 0) + 3)).tolist()
    expected = [set(order[first : first + EIGHT]) for first in range(0, SIZE - EIGHT + 1, EIGHT)]

    def check(loader: Any, name: str, first: int = 0) -> None:
        parts = zip(*of_all_ranks(draw(loader)), strict=True)
        assert [set().union(*each) for each in parts] == expected[first:], (name, seed)

    states = {}
    for kind in KINDS:
        for batch_size in (None, EIGHT // dist.get_world_size()):
            loader = loader_of(kind, seed, batch_size)
            assert loader.seed == (seed or 0)
            check(loader, f"{kind}, batch size {batch_size}")
        draw(loader := loader_of(kind, seed), stop=2)
        states[kind] = loader.state_dict()
    for before, state in states.items():
        for after in KINDS:
            loader = loader_of(after, seed)
            loader.load_state_dict(state)
            check(loader, f"{before} to {after}, resumed", 2)
    with pytest.raises(ValueError, match="seed was"):
        loader_of("even", 5).load_state_dict(states["ZeRO"])
