"""A process whose kind of device is not in the profile measures it before it joins; one that cannot is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero import ElasticConfig
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.profiling.layer_profiler import profile_layers
from tests.parallel.elastic.test_elastic_training import STEPS, check_parameters
from tests.parallel.elastic.test_waiting_for_nodes import run_until_all_end
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2
from tests.support import elastic_jobs
from tests.support.elastic_jobs import MICRO_BATCH, Job, Outcome, Texts, profile, train


def only_big() -> ModelProfile:
    """The profile without times of small devices."""
    whole = profile()
    return whole.model_copy(update={"times": tuple(each for each in whole.times if each.device == "big")})


def measured() -> ModelProfile:
    batch = {key: torch.stack([value] * MICRO_BATCH) for key, value in Texts()[0].items()}
    return profile_layers(gpt2().double(), batch, micro_batches=(MICRO_BATCH,), min_seconds=0).profile


def cannot_measure() -> ModelProfile:
    raise MemoryError("the model does not fit")


def train_with(measure: Callable[[], ModelProfile] | None, joins: tuple[int, ...], told: Any) -> None:
    """The script of members whose profile has big devices only."""
    options = functools.partial(ElasticConfig, measure=measure)
    with patch.object(elastic_jobs, "profile", only_big), patch.object(elastic_jobs, "ElasticConfig", options):
        train(STEPS, None, None, joins, told)


def run(measure: Callable[[], ModelProfile] | None, newcomer: str, joins: tuple[int, ...] = ()) -> Outcome:
    """A job of one big node, which another node wants to join after two steps."""
    with Job(0, script=(train_with, measure, joins)) as job:
        job.start("big-0")

        def start(_: int, kind: str, content: list[Any]) -> None:
            if kind == "step" and content[0] == 2 and len(job.members) == 1:
                job.start(newcomer)

        return run_until_all_end(job, start)


def test_a_newcomer_measures_its_kind_and_joins() -> None:
    outcome = run(measured, "small-0", joins=(4,))
    assert outcome.errors == [] and outcome.ended == {0: 0, 1: 0}
    assert [(1, 2)] in [[(each.before, each.after) for each in of_member] for of_member in outcome.recoveries]
    check_parameters(outcome)


@pytest.mark.parametrize(
    ("measure", "newcomer", "words"),
    [
        (None, "small-0", "has no times of small, the device of this process; it has those of big"),
        (cannot_measure, "small-0", "cannot join, because its device, small, is not in the profile of gpt2, and"),
        (None, "other-7", "on node other-7, which is not in the cluster file; it has big-0, small-0"),
    ],
)
def test_a_process_that_cannot_join_is_refused_and_the_others_go_on(
    measure: Callable[[], ModelProfile] | None, newcomer: str, words: str
) -> None:
    outcome = run(measure, newcomer)
    (error,) = outcome.errors
    assert words in error
    assert outcome.ended[0] == 0 and outcome.ended[1] != 0
    assert outcome.recoveries == [()]
    check_parameters(outcome)
