"""ADAPT's device dropping and ring order in training, against one process on the same global batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.cluster import DistCoordinator
from torch import Tensor, nn

from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.cluster.topology import MeasuredLink
from colossal_hetero.profiling.rank_profiler import describe
from tests.support import zero_runs
from tests.support.harness import answer, start_ranks
from tests.support.zero_runs import Numbered, boosted, equal_devices, fit, global_batches, make_model

GLOBAL_BATCH = 9


def write_profile(path: Path, stage: int, slow_links: dict[tuple[int, int], float], ranks: int) -> None:
    """A profile of equal devices, a second per sample, whose links take a tenth of a second, others as given."""
    profile = equal_devices(None, describe(make_model()), stage=stage, replica_of=range(ranks))
    seconds = {(a, b): slow_links.get((a, b), 0.1) for a in range(ranks) for b in range(a + 1, ranks)}
    links = tuple(
        MeasuredLink(ranks=pair, protocol="gloo", latency_seconds=latency, bytes_per_second=1e12)
        for pair, latency in seconds.items()
    )
    save_profile(profile.model_copy(update={"links": links, "communication_seconds": max(seconds.values())}), path)


def train(path: Path, stage: int) -> tuple[tuple[int, ...], int, Tensor, list[int]]:
    coordinator, seen = DistCoordinator(), list[int]()
    run = boosted(stage, None, "adamw", samples=GLOBAL_BATCH, method="adapt", profile=path)

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
    with start_ranks(ranks, train, tmp_path / "profile.json", stage) as started:
        answers = [answer(receiver) for _, receiver in started]
    alone = make_model()
    fit(alone, zero_runs.make_optimizer(alone, "adamw"), global_batches(Numbered(), GLOBAL_BATCH))
    all_seen: set[int] = set()
    for rank, (succeeded, result) in enumerate(answers):
        if rank not in ring:
            assert not succeeded and "SystemExit: 0" in result, result
            continue
        assert succeeded, result
        (*numbers, size), samples, logits, seen = result
        assert numbers == [ring.index(rank)] * 3 and size == len(ring) and samples == GLOBAL_BATCH
        torch.testing.assert_close(logits, alone(Numbered().inputs), rtol=1e-5, atol=1e-6)
        all_seen.update(seen)
    assert all_seen == set(range(len(Numbered())))
