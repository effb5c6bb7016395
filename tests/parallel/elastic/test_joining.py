"""A member dies while another process joins: the others and the newcomer go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.elastic.test_elastic_training import STEPS, check_parameters
from tests.support.elastic_jobs import Job


@pytest.mark.parametrize("phase", ["formed", "moving", "moved"])
def test_a_member_dies_while_another_joins(phase: str, tmp_path: Path) -> None:
    with Job(STEPS, joins=(3,), dooms=tmp_path) as job:
        for node in ["big-0", "small-0", "small-1"]:
            job.start(node)
        while job.alive():
            message = job.message()
            if message is not None and message[1] == "step" and message[2][0] == 3 and len(job.members) == 3:
                job.doom(1, phase)
                job.start("small-2")
        outcome = job.finish()
    assert outcome.errors == []
    assert {number for number, code in outcome.ended.items() if code} == {1}
    assert len(outcome.parameters) == 3
    check_parameters(outcome)
