"""What elastic training cannot do is refused before a process joins a job."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero import BatchConfig, ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from tests.support.machines import Nodes, machines

PLANNING = PlanConfig(cluster=machines(Nodes("InfiniBand", (1, 1))), profile="profile.json", global_batch_size=8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(elastic="yes"), TypeError, "is not an ElasticConfig"),
        (dict(plan="plan.json"), ValueError, 'use plan="auto"'),
        (dict(planning=None), ValueError, "planning=PlanConfig"),
        (dict(planning={"cluster": "cluster.toml"}), ValueError, "planning=PlanConfig"),
        (dict(planning=PlanConfig()), ValueError, "planning=PlanConfig"),
        (dict(pp_size=2), ValueError, "pp_size=2 is not possible"),
        (dict(zero_stage=1), ValueError, "use zero_stage=0"),
        (dict(batches=BatchConfig(global_batch_size=8)), ValueError, "leave batches out"),
        (dict(enable_sequence_parallelism=True), ValueError, "sequence parallelism is not possible"),
    ],
)
def test_arguments_that_are_not_possible(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(plan="auto", planning=PLANNING, elastic=ElasticConfig()) | changes
    with pytest.raises(error, match=message):
        HeteroHybridParallelPlugin(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(min_members=0), "min_members=0 must be"),
        (dict(min_members=True), "min_members=True must be"),
        (dict(min_members=3, max_members=2), "max_members=2 is less than min_members=3"),
        (dict(max_members=2.5), "max_members=2.5 must be a whole number"),
        (dict(max_members=True), "max_members=True must be a whole number"),
        (dict(timeout_seconds=float("inf")), "timeout_seconds=inf must be a positive number"),
        (dict(join_seconds=float("nan")), "join_seconds=nan must be a positive number"),
        (dict(start_seconds=float("inf")), "start_seconds=inf must be a number of seconds"),
        (dict(recovery="again"), 'recovery=\'again\' must be "in-process" or "restart"'),
        (dict(memory="/dev/shm/x"), 'used with recovery="restart" only'),
        (dict(recovery="restart", memory_every=0), "memory_every=0 must be a whole number"),
        (dict(dead_seconds=0.0), "dead_seconds=0.0 must be a positive number"),
    ],
)
def test_options_that_are_not_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticConfig(**options)
