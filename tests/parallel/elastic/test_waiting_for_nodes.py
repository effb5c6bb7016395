"""Members that cannot hold the model wait for others, with what they hold."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from itertools import chain
from typing import Any
from unittest.mock import patch

from colossal_hetero import ElasticConfig
from tests.parallel.elastic.test_elastic_training import STEPS, check_parameters
from tests.support import elastic_jobs
from tests.support.elastic_jobs import Job, Outcome, cluster, train

SECONDS = 120


def run_until_all_end(job: Job, at_message: Callable[[int, str, list[Any]], None]) -> Outcome:
    deadline = time.monotonic() + SECONDS
    while job.alive():
        assert time.monotonic() < deadline, job.outcome
        if (message := job.message()) is not None:
            at_message(*message)
    return job.finish()


def test_the_first_node_waits_for_a_second_one() -> None:
    """A small node cannot hold the model alone."""
    with Job(STEPS) as job:
        job.start("small-0")
        time.sleep(8)  # long enough to start and to find no plan
        assert job.alive() == [0] and job.message() is None
        job.start("small-1")
        outcome = run_until_all_end(job, lambda *_: None)
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(1, STEPS + 1))
    check_parameters(outcome)


def test_a_member_that_is_left_alone_keeps_the_state_until_another_one_comes() -> None:
    """Two members share the model. One is warned, the other takes its half, which is more than it may train with."""
    with Job(STEPS) as job:
        job.start("small-0")
        job.start("small-1")

        def warn(number: int, kind: str, content: list[Any]) -> None:
            if kind == "step" and content[0] == 4:
                job.members[1].terminate()

        deadline = time.monotonic() + SECONDS
        while 1 in job.alive():
            assert time.monotonic() < deadline, job.outcome
            if (message := job.message()) is not None:
                warn(*message)
        steps = len(job.outcome.losses)
        assert job.alive() == [0] and steps < STEPS
        job.start("small-2")
        outcome = run_until_all_end(job, lambda *_: None)
    assert outcome.errors == [] and outcome.ended == {0: 0, 1: 0, 2: 0}
    assert sorted(outcome.losses) == list(range(1, STEPS + 1))
    assert [(each.before, each.after) for each in chain(*outcome.recoveries)] == [(2, 2)]
    check_parameters(outcome)


def train_impatiently(told: Any) -> None:
    """The script of members that wait for 4 s at most, and whose devices are too small."""
    whole = cluster()
    kinds = {each.kind.name: dataclasses.replace(each.kind, memory_bytes=4 * 10**7) for each in whole.devices}
    small = dataclasses.replace(
        whole, devices=tuple(dataclasses.replace(each, kind=kinds[each.kind.name]) for each in whole.devices)
    )
    options = functools.partial(ElasticConfig, join_seconds=4.0)
    with patch.object(elastic_jobs, "cluster", lambda: small), patch.object(elastic_jobs, "ElasticConfig", options):
        train(STEPS, None, None, (), told)


def test_all_members_say_what_is_missing_if_nobody_comes() -> None:
    with Job(0, script=(train_impatiently,)) as job:
        for node in ("big-0", "small-0"):
            job.start(node)
        outcome = run_until_all_end(job, lambda *_: None)
    assert len(outcome.errors) == 2
    for error in outcome.errors:
        assert "2 members, and no more came within 4 s: " in error
        assert "the model needs at least" in error or "no device can hold block" in error
