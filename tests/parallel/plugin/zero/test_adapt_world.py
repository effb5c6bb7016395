"""ADAPT's device dropping and ring order in training, against one process on the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.cluster import DistCoordinator
from torch import nn

from colossal_hetero import BatchConfig, HeteroZeroPlugin
from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.cluster.topology import MeasuredLink
from colossal_hetero.profiling.rank_profiler import describe
from tests.support.harness import answer, start_ranks
from tests.support.zero_runs import Numbered, equal_devices, fit, global_batches, make_model, make_optimizer

GLOBAL_BATCH = 9


def write_profile(path: Path, stage: int, slow_links: dict[tuple[int, int], float], ranks: int) -> None:
    """A profile of equal devices, a second per sample, whose links take a tenth of a second, others as given."""
    profile = equal_devices(None, describe(make_model()), stage=stage, replica_of=range(ranks))
    pairs = [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    links = tuple(
        MeasuredLink(ranks=pair, protocol="gloo", latency_seconds=slow_links.get(pair, 0.1), bytes_per_second=1e12)
        for pair in pairs
    )
    longest = max(slow_links.get(pair, 0.1) for pair in pairs)
    save_profile(profile.model_copy(update={"links": links, "communication_seconds": longest}), path)


def train(path: Path, stage: int) -> dict[str, Any]:
    coordinator, launched = DistCoordinator(), dist.get_rank()
    plugin = HeteroZeroPlugin(stage, batches=BatchConfig(global_batch_size=GLOBAL_BATCH, method="adapt", profile=path))
    model, loader = make_model(), plugin.prepare_dataloader(Numbered())
    optimizer = make_optimizer(model, "adamw")
    model, optimizer, criterion, loader, _ = Booster(plugin=plugin).boost(
        model, optimizer, nn.CrossEntropyLoss(), loader
    )
    seen = []
    for inputs, labels in loader:
        seen += inputs[:, 7].int().tolist()
        optimizer.backward(criterion(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return {
            "launched": launched,
            "rank": (dist.get_rank(), plugin.rank, coordinator.rank, coordinator.world_size),
            "shares": [share.samples for share in plugin.allocation.shares],
            "logits": model(Numbered().inputs),
            "seen": seen,
        }


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
    fit(alone, make_optimizer(alone, "adamw"), global_batches(Numbered(), GLOBAL_BATCH))
    for rank, (succeeded, result) in enumerate(answers):
        if rank not in ring:
            assert not succeeded and "SystemExit: 0" in result, result
            continue
        assert succeeded, result
        new = ring.index(rank)
        assert result["rank"] == (new, new, new, len(ring)) and sum(result["shares"]) == GLOBAL_BATCH
        torch.testing.assert_close(result["logits"], alone(Numbered().inputs), rtol=1e-5, atol=1e-6)
    seen = {number for succeeded, result in answers if succeeded for number in result["seen"]}
    assert seen == set(range(len(Numbered())))


@pytest.mark.parametrize("others", [{"profile": "p.json"}, {"method": "adapt"}])
def test_a_cluster_that_has_no_effect_is_refused(others: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"cluster='c.toml' has an effect only with method='adapt'"):
        BatchConfig(global_batch_size=8, cluster="c.toml", **others)
