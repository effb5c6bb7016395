"""Processes that come: the first world, members that wait for others with what they hold, unknown kinds of devices."""

from __future__ import annotations

import dataclasses
import signal
import time
from itertools import chain
from typing import Any
from unittest.mock import patch

from colossal_hetero import ElasticConfig
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from tests.parallel.elastic.test_elastic_training import STEPS
from tests.support import elastic_jobs
from tests.support.elastic_jobs import (
    LIMIT_SECONDS,
    QUICK,
    Job,
    check_parameters,
    cluster,
    profile,
    train,
)


def train_together(told: Any) -> None:
    """The script of members that wait for two at the start."""
    train(STEPS, None, None, (), told, ElasticConfig(**QUICK, start_seconds=60.0, max_members=2))


def wait_until_counted(job: Job) -> None:
    """Until the first member waits for others."""
    while not job._server.check(["elastic/test/counted/started"]):
        time.sleep(0.05)


def test_a_member_that_comes_late_is_in_the_first_world() -> None:
    with Job(0, script=(train_together,)) as job:
        job.start("big-0")
        wait_until_counted(job)
        job.start("small-0")
        outcome = job.run()
    assert outcome.errors == [] and outcome.recoveries == [(), ()]
    check_parameters(outcome.parameters, STEPS)


def test_a_member_that_is_in_no_world_yet_ends_by_sigterm_at_once() -> None:
    """torchrun waits for it before it starts the node again."""
    with Job(0, script=(train_together,)) as job:
        job.start("big-0")
        wait_until_counted(job)
        job.members[0].terminate()
        job.members[0].join(20)
        assert job.members[0].exitcode == -signal.SIGTERM


def test_the_first_node_waits_for_a_second_one() -> None:
    """A small node cannot hold the model alone."""
    with Job(STEPS) as job:
        job.start("small-0")
        time.sleep(3)  # mostly long enough to start and to find no plan
        assert job.alive() == [0] and job.message() is None
        job.start("small-1")
        outcome = job.run()
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(1, STEPS + 1))
    check_parameters(outcome.parameters, STEPS)


def test_a_member_that_is_left_alone_keeps_the_state_until_another_one_comes() -> None:
    """Two members share the model. One is warned, the other takes its half, which is more than it may train with."""
    with Job(STEPS) as job:
        job.start("small-0")
        job.start("small-1")
        deadline = time.monotonic() + LIMIT_SECONDS
        while 1 in job.alive():
            assert time.monotonic() < deadline, job.outcome
            message = job.message()
            if message is not None and message[1] == "step" and message[2][0] == 4:
                job.members[1].terminate()
        steps = len(job.outcome.losses)
        assert job.alive() == [0] and steps < STEPS
        job.start("small-2")
        outcome = job.run()
    assert outcome.errors == [] and outcome.ended == {0: 0, 1: 0, 2: 0}
    assert sorted(outcome.losses) == list(range(1, STEPS + 1))
    assert [(each.before, each.after) for each in chain(*outcome.recoveries)] == [(2, 2)]
    check_parameters(outcome.parameters, STEPS)


def train_impatiently(told: Any) -> None:
    """The script of members that wait for 2 s at most, and whose devices are too small."""
    whole = cluster()
    kinds = {each.kind.name: dataclasses.replace(each.kind, memory_bytes=4 * 10**7) for each in whole.devices}
    small = dataclasses.replace(
        whole, devices=tuple(dataclasses.replace(each, kind=kinds[each.kind.name]) for each in whole.devices)
    )
    train(STEPS, None, None, (), told, ElasticConfig(**QUICK, join_seconds=2.0), small)


def test_all_members_say_what_is_missing_if_nobody_comes() -> None:
    with Job(0, script=(train_impatiently,)) as job:
        for node in ("big-0", "small-0"):
            job.start(node)
        outcome = job.run()
    assert len(outcome.errors) == 2
    for error in outcome.errors:
        assert "2 members, and no more came within 2 s: " in error
        assert "the model needs at least" in error or "no device can hold block" in error


def only_big() -> ModelProfile:
    """The profile without times of small devices."""
    whole = profile()
    return whole.model_copy(update={"times": tuple(each for each in whole.times if each.device == "big")})


def train_with_big(told: Any) -> None:
    """The script of members whose profile has big devices only."""
    with patch.object(elastic_jobs, "profile", only_big):
        train(STEPS, None, None, (), told, ElasticConfig(**QUICK))


def test_processes_that_cannot_join_are_refused_and_the_others_go_on() -> None:
    with Job(0) as job:
        job.start("big-0", script=(train_with_big,))

        def start(_: int, kind: str, content: list[Any]) -> None:
            if kind == "step" and content[0] == 2 and len(job.members) == 1:
                for node in ("small-0", "other-7"):
                    job.start(node, script=(train_with_big,))

        outcome = job.run(start)
    for words in (
        "has no times of small, the device of this process; it has those of big",
        "on node other-7, which is not in the cluster file; it has big-0, small-0",
    ):
        assert sum(words in error for error in outcome.errors) == 1, words
    assert [bool(outcome.ended[number]) for number in range(3)] == [False, True, True]
    assert outcome.recoveries == [()]
