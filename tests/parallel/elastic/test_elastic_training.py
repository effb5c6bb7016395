"""A job whose members die, join and leave trains like one process that nothing happens to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from colossal_hetero import ElasticConfig
from colossal_hetero.plugin.replicas.replica_gradients import ReplicaGradients
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2
from tests.support import elastic_jobs
from tests.support.elastic_jobs import Job, Kill, Outcome, run_job, train, undisturbed

STEPS = 10


def check(
    nodes: Sequence[str], kills: Mapping[int, Kill], joins: Mapping[str, int], warned: Mapping[int, int]
) -> Outcome:
    """Run a job, and compare what it has trained."""
    outcome = run_job(nodes, STEPS, kills, joins, warned)
    assert outcome.errors == []
    assert {number for number, code in outcome.ended.items() if code} == set(kills)
    assert sorted(outcome.losses) == list(range(1, STEPS + 1))
    check_parameters(outcome)
    return outcome


def check_parameters(outcome: Outcome, steps: int = STEPS) -> None:
    _, expected = undisturbed(steps)
    assert outcome.parameters
    for parameters in outcome.parameters:
        for name, found in parameters.items():
            reference = expected.get(name, expected["transformer.wte.weight"])
            torch.testing.assert_close(torch.from_numpy(found)[: len(reference)], reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kills", "changes"),
    [
        ({1: Kill(2, "forward"), 3: Kill(7, "sums")}, [(3, 2), (2, 3), (3, 2)]),
        ({2: Kill(2, "backward"), 3: Kill(7, "before commit")}, [(3, 2), (2, 3), (3, 2)]),
        ({0: Kill(2, "after commit")}, [(3, 2), (2, 3)]),
    ],
    ids=["forward and sums", "backward and commit", "rank 0 after the commit"],
)
def test_members_die_and_join(kills: Mapping[int, Kill], changes: list[tuple[int, int]]) -> None:
    outcome = check(["big-0", "small-0", "small-1"], kills, {"small-2": 4}, {})
    assert changes in [[(each.before, each.after) for each in of_member] for of_member in outcome.recoveries]
    repeated = {(each.before < each.after, each.iterations_repeated) for each in chain(*outcome.recoveries)}
    assert (True, 0) in repeated and (True, 1) not in repeated
    assert (False, 1) in repeated  # by those that had begun another iteration when the member was lost
    (joined,) = (start for start in outcome.starts if start.step)
    assert joined.received_bytes > 0


def test_a_member_that_is_warned_hands_over_what_only_it_holds() -> None:
    """A pipeline of two members: the second half of the model is on the member that leaves."""
    outcome = check(["big-0", "small-0"], {}, {}, {1: 4})
    ((change,),) = outcome.recoveries
    assert (change.before, change.after, change.iterations_repeated) == (2, 1, 0)
    assert change.received_bytes > 0


def test_a_lost_state_is_named_and_a_new_job_continues_from_the_checkpoint(tmp_path: Path) -> None:
    outcome = run_job(["big-0", "small-0"], STEPS, {1: Kill(5, "backward")}, folder=tmp_path)
    (error,) = outcome.errors
    assert "the members that are left do not hold block-000" in error and "latest checkpoint" in error
    assert max(outcome.losses) == 5
    outcome = run_job(["big-0", "small-0", "small-1"], STEPS, {2: Kill(7, "sums")}, folder=tmp_path)
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(4, STEPS + 1))
    check_parameters(outcome)


@pytest.mark.parametrize("dead", [0, 1])
def test_nobody_waits_for_the_file_of_a_member_that_is_lost(dead: int, tmp_path: Path) -> None:
    """All members are in ``plugin.wait_for_saves``, so no collective fails. Messages are in the memory of rank 0."""
    outcome = run_job(["big-0", "small-0", "small-1"], STEPS, {dead: Kill(3, "saving")}, folder=tmp_path)
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(1, STEPS + 1))
    check_parameters(outcome)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000006", "step-00000009"]


def train_with_spares(kill: Kill | None, told: Any) -> None:
    """The script of members, of which at most three train."""
    with patch.object(elastic_jobs, "ElasticConfig", partial(ElasticConfig, max_members=3)):
        train(STEPS, kill, None, (), told)


def train_with_empty_buffer(told: Any, kill: Kill | None = None) -> None:
    """The script of members whose model has a buffer without elements."""

    def model() -> nn.Module:
        found = gpt2()
        found.transformer.register_buffer("nothing", torch.empty(0, 4))
        return found

    with patch.object(elastic_jobs, "gpt2", model):
        train(STEPS, kill, None, (), told)


def test_a_tensor_without_elements_is_not_lost() -> None:
    with Job(STEPS) as job:
        for number, node in enumerate(["big-0", "small-0", "big-1"]):
            job._script = (partial(train_with_empty_buffer, kill=Kill(4, "backward") if number == 2 else None),)
            job.start(node)
        while job.alive():
            job.message()
        outcome = job.finish()
    assert outcome.errors == [] and [len(each) for each in outcome.recoveries] == [1, 1]


def run_with_spare(dead: int | None) -> Outcome:
    with Job(STEPS) as job:
        for number, node in enumerate(["big-0", "small-0", "small-1", "small-2"]):
            job._script = (train_with_spares, Kill(4, "backward") if number == dead else None)
            job.start(node)
            while number == 2 and job.outcome.starts[2:] == []:  # the first three are the members
                job.message()
        while job.alive():
            job.message()
        return job.finish()


@pytest.mark.parametrize("dead", [1, 2])
def test_a_spare_that_takes_the_place_gives_the_same_bits(dead: int) -> None:
    expected, found = run_with_spare(None), run_with_spare(dead)
    assert expected.errors == found.errors == []
    assert [len(each) for each in expected.recoveries] == [0, 0, 0]
    changes = [(each.before, each.after, each.iterations_repeated) for each in chain(*found.recoveries)]
    assert changes == [(3, 3, 1)] * 2
    bits = {name: each for parameters in expected.parameters for name, each in parameters.items()}
    for parameters in found.parameters:
        for name, each in parameters.items():
            assert np.array_equal(each, bits[name]), name


def train_slowly(told: Any) -> None:
    """The script of members that take a while for each step."""
    train(24, None, None, (), told, after_step=lambda *_: time.sleep(0.1))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_process_that_wakes_ends_without_a_change_of_the_others(frozen: int) -> None:
    with Job(24, (train_slowly,)) as job:
        for node in ("big-0", "small-0", "big-1"):
            job.start(node)
        state = "running"
        while job.alive():
            message = job.message()
            if message is None or message[1] != "step":
                continue
            step, members = message[2][:2]
            if state == "running" and step == 4 and members == 3:
                os.kill(job.members[frozen].pid, signal.SIGSTOP)
                state = "frozen"
            elif state == "frozen" and members == 2 and step >= 10:
                os.kill(job.members[frozen].pid, signal.SIGCONT)
                state = "awake"
        outcome = job.finish()
    assert state == "awake"
    (error,) = outcome.errors
    assert "this process was taken for dead at step" in error and "start it again to join them" in error
    changes = [[(each.before, each.after) for each in of_member] for of_member in outcome.recoveries]
    assert len(changes) == 2 and all(each[-1] == (3, 2) for each in changes), changes
    check_parameters(outcome, 24)


def test_a_process_that_comes_too_late_ends() -> None:
    outcome = run_job(["big-0"], 2, joins={"small-0": 2})
    assert outcome.errors == [] and outcome.ended == {0: 0, 1: 0}
    assert len(outcome.parameters) == 1


def train_and_fail(told: Any) -> None:
    """The script of members, in which the third step always fails as if a connection was lost."""
    commit = ReplicaGradients.commit

    def failing(gradients: ReplicaGradients, *args: Any) -> Any:
        if gradients.exchange.__self__.version == 2:  # type: ignore[attr-defined]
            raise RuntimeError("Connection closed by peer")
        return commit(gradients, *args)

    with patch.object(ReplicaGradients, "commit", failing):
        train(4, None, None, (), told)


def test_a_step_that_always_fails_ends_the_job() -> None:
    with Job(0, script=(train_and_fail,)) as job:
        job.start("big-0")
        while job.alive():
            job.message()
        outcome = job.finish()
    (error,) = outcome.errors
    assert "step 3 has failed 3 times, although all members were there" in error
    assert sorted(outcome.losses) == [1, 2]
