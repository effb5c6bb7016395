"""HeteroHybridParallelPlugin with uneven batches, on replicas of one or more ranks, compared with one process; loaders
of equal plans, unequal plans and uneven batches, which draw alike and continue from each other's positions; and ADAPT's
device dropping and ring order."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.cluster import DistCoordinator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from colossal_hetero import BalanceConfig, BatchConfig, HeteroHybridParallelPlugin
from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.cluster.topology import MeasuredLink
from colossal_hetero.profiling.rank_profiler import describe
from tests.support import zero_runs
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.harness import answer, start_ranks
from tests.support.planning import make_plan, planned, unequal_plan
from tests.support.training import CLASSES, tiny_vit, zero_plugin
from tests.support.zero_runs import Numbered, boosted, fit, global_batches, make_model, sizes_by_rank, unmeasured

SAMPLES, GLOBAL_BATCH = 17, 7
STEPS = 3  # an epoch, whose last global batch has three samples


class Images(Dataset):
    images = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % CLASSES


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(Images().images).float()


@unmeasured
def train(division: list[list[int]], tp_size: int = 1, clip: float = 0.0, **options: Any) -> Tensor:
    batches = BatchConfig(global_batch_size=GLOBAL_BATCH, max_micro_batch=7)
    plugin = HeteroHybridParallelPlugin(tp_size, 1, batches=batches, **(dict(precision="fp32") | options))
    loader, model, criterion = plugin.prepare_dataloader(Images()), tiny_vit(), nn.CrossEntropyLoss()
    optimizer = zero_runs.make_optimizer(model, "sgd")
    model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(model, optimizer, criterion, loader)
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
    fit(model, zero_runs.make_optimizer(model, "sgd"), global_batches(Images(), GLOBAL_BATCH), max_norm=max_norm)
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


# ADAPT's ring --------------------------------------------------------------------------------------------------------


RING_BATCH = 9


def write_profile(path: Path, stage: int, slow_links: dict[tuple[int, int], float], ranks: int) -> None:
    """A profile of equal devices, a second per sample, whose links take a tenth of a second, others as given."""
    profile = zero_runs.equal_devices(None, describe(make_model()), stage=stage, replica_of=range(ranks))
    seconds = {(a, b): slow_links.get((a, b), 0.1) for a in range(ranks) for b in range(a + 1, ranks)}
    links = tuple(
        MeasuredLink(ranks=pair, protocol="gloo", latency_seconds=latency, bytes_per_second=1e12)
        for pair, latency in seconds.items()
    )
    save_profile(profile.model_copy(update={"links": links, "communication_seconds": max(seconds.values())}), path)


def train_in_ring(path: Path, stage: int) -> tuple[tuple[int, ...], int, Tensor, list[int]]:
    coordinator, seen = DistCoordinator(), list[int]()
    run = boosted(stage, None, "adamw", samples=RING_BATCH, method="adapt", profile=path)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(batch[0][:, 7].int().tolist())
        return zero_runs.loss_of(model, batch)

    run.fit(loss_of)
    ranks = dist.get_rank(), run.plugin.rank, coordinator.rank, coordinator.world_size
    samples = sum(share.samples for share in run.plugin.allocation.shares)
    return ranks, samples, run.model(Numbered().inputs).detach(), seen


@pytest.mark.parametrize(
    ("ranks", "stage", "slow_links", "ring"),
    [
        (3, 0, {(0, 1): 20.0, (1, 2): 20.0}, (0, 2)),  # all links of rank 1 are slow
        (3, 1, {(0, 1): 20.0, (0, 2): 20.0}, (1, 2)),  # rank 0, which has the store
        (4, 0, {(0, 1): 0.5, (2, 3): 0.5}, (0, 2, 1, 3)),  # all stay, in another order
        (2, 2, {(0, 1): 20.0}, (1,)),
    ],
)
def test_training_without_devices_that_slow_down_the_others(
    tmp_path: Path, ranks: int, stage: int, slow_links: dict[tuple[int, int], float], ring: tuple[int, ...]
) -> None:
    write_profile(tmp_path / "profile.json", stage, slow_links, ranks)
    with start_ranks(ranks, train_in_ring, tmp_path / "profile.json", stage) as started:
        answers = [answer(receiver) for _, receiver in started]
    alone = make_model()
    fit(alone, zero_runs.make_optimizer(alone, "adamw"), global_batches(Numbered(), RING_BATCH))
    all_seen: set[int] = set()
    for rank, (succeeded, result) in enumerate(answers):
        if rank not in ring:
            assert not succeeded and "SystemExit: 0" in result, result
            continue
        assert succeeded, result
        (*numbers, size), samples, logits, seen = result
        assert numbers == [ring.index(rank)] * 3 and size == len(ring) and samples == RING_BATCH
        torch.testing.assert_close(logits, alone(Numbered().inputs), rtol=1e-5, atol=1e-6)
        all_seen.update(seen)
    assert all_seen == set(range(len(Numbered())))
