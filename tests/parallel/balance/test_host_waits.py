"""A training iteration does not make the host wait for a GPU: no operation reads a result of the device.

On a CPU such operations are seen by recording what torch dispatches. Copies between host and device are seen on a GPU
only (``benchmarks/gpu/parts/sync.py``).
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.training.host_waits import host_waits
from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.layers.language_head import VocabularyRows
from tests.support.harness import run_ranks
from tests.support.training import batch, boost, loss_of, ours, scripted, sgd, tiny_vit

CONFIGS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "resize columns at random": {"mode": "resize", "pruning": Pruning(resizing="column", priority="random")},
    "resize columns by priority": {
        "mode": "resize",
        "pruning": Pruning(resizing="column", priority="priority", priority_interval=2, imputation="same"),
    },
    "resize blocks": {"mode": "resize", "pruning": Pruning(priority="priority-diff", priority_interval=2)},
    "migrate columns": {"mode": "migrate", "migration": "broadcast-reduce"},
    "semi": {"mode": "semi", "pruning": Pruning(priority="priority", priority_interval=2)},
    "auto": {"mode": "auto", "max_resize": 0.3, "pruning": Pruning(priority="priority-diff", priority_interval=2)},
}
ITERATIONS = 8


def slow_and_fast_again(rank: int, iteration: int) -> float:
    return 4.0 if rank == 1 and iteration < 4 else 1.0


def _waits(choices: dict[str, Any]) -> tuple[list[str], int]:
    """Where the host would wait, and how many plans were followed."""
    config = BalanceConfig(warmup_iterations=0, patience=1, measure_costs=False, **choices)
    with scripted(slow_and_fast_again):
        run = boost(ours(config, tp_size=2), tiny_vit(depth=1), sgd)
    plans: list[BalancePlan] = [run.plugin.balancer.plan]
    with host_waits(torch.device("cpu")) as waits:
        for number in range(ITERATIONS):
            images, labels = batch(number)
            run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
            if run.plugin.balancer.plan != plans[-1]:
                plans.append(run.plugin.balancer.plan)
    return sorted({wait.place for wait in waits}), len(plans)


def _all_waits() -> dict[str, tuple[list[str], int]]:
    return {name: _waits(choices) for name, choices in CONFIGS.items()}


def test_a_training_iteration_does_not_wait_for_the_device_in_any_mode() -> None:
    for found in run_ranks(2, _all_waits):
        assert {name: places for name, (places, _) in found.items()} == {name: [] for name in CONFIGS}
        assert all(plans > 2 for name, (_, plans) in found.items() if name != "off"), found


def test_rows_of_a_vocabulary_are_found_without_waiting() -> None:
    numbers = torch.tensor([4, 5, 6, 7, 1])  # 6 and 7 are padding
    with host_waits(torch.device("cpu")) as waits:
        columns = VocabularyRows(numbers, vocabulary=6).columns_of(torch.tensor([5, 0, 1, 4, -100]))
    assert columns.tolist() == [1, -1, 4, 0, -1]
    assert not waits


def test_waits_are_recorded_with_their_place() -> None:
    values = torch.arange(4.0)
    with host_waits(torch.device("cpu")) as waits:
        values[values > 1]
        values[torch.tensor([0, 1])]
        if values.sum():
            values[values > 1] = 0.0
    assert [wait.place.partition(":")[0] for wait in waits] == ["balance/test_host_waits.py"] * 3
    assert all(wait.is_in("tests/parallel/balance/test_host_waits.py") for wait in waits)
