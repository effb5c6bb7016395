"""The first world has all members that are expected."""

from __future__ import annotations

import functools
import signal
import time
from typing import Any
from unittest.mock import patch

from colossal_hetero import ElasticConfig
from tests.parallel.elastic.test_elastic_training import STEPS, check_parameters
from tests.parallel.elastic.test_waiting_for_nodes import run_until_all_end
from tests.support import elastic_jobs
from tests.support.elastic_jobs import Job, train


def train_together(told: Any) -> None:
    """The script of members that wait for two at the start."""
    options = functools.partial(ElasticConfig, start_seconds=60.0, max_members=2)
    with patch.object(elastic_jobs, "ElasticConfig", options):
        train(STEPS, None, None, (), told)


def test_a_member_that_comes_late_is_in_the_first_world() -> None:
    with Job(0, script=(train_together,)) as job:
        job.start("big-0")
        time.sleep(4)
        job.start("small-0")
        outcome = run_until_all_end(job, lambda *_: None)
    assert outcome.errors == [] and outcome.recoveries == [(), ()]
    check_parameters(outcome)


def test_a_member_that_is_in_no_world_yet_ends_by_sigterm_at_once() -> None:
    """torchrun waits for it before it starts the node again."""
    with Job(0, script=(train_together,)) as job:
        job.start("big-0")
        while not job._server.check(["elastic/test/counted/started"]):
            time.sleep(0.05)
        job.members[0].terminate()
        job.members[0].join(20)
        assert job.members[0].exitcode == -signal.SIGTERM
