"""Which workers the supervisor starts again, when all end, and with which exit status."""

from __future__ import annotations

from dataclasses import replace

from colossal_hetero.elastic.supervisor.supervise import (
    Action,
    NodeProgress,
    after_exit,
    describe_status,
    exit_status,
    shell_status,
)


def test_each_worker_is_started_again_as_often_as_allowed() -> None:
    progress = NodeProgress.start(workers=2, max_restarts=2)
    for rank in (0, 1, 0, 1):
        progress, action = after_exit(progress, rank, 1)
        assert action is Action.RESTART
    assert progress.restarts == (2, 2) and progress.statuses == (None, None)
    progress, action = after_exit(progress, 1, -9)
    assert action is Action.END_ALL and progress.is_ending and not progress.is_over
    progress, action = after_exit(progress, 0, 3)
    assert action is Action.NOTHING and progress.is_over
    assert exit_status(progress) == 128 + 9  # of the first that failed


def test_without_restarts_the_first_error_ends_all() -> None:
    _, action = after_exit(NodeProgress.start(3, 0), 2, 5)
    assert action is Action.END_ALL


def test_a_worker_that_ends_with_0_is_not_started_again() -> None:
    progress = NodeProgress.start(2, 3)
    for rank in (1, 0):
        assert not progress.is_over
        progress, action = after_exit(progress, rank, 0)
        assert action is Action.NOTHING
    assert progress.is_over and exit_status(progress) == 0


def test_nothing_is_started_again_after_all_were_asked_to_end() -> None:
    progress = replace(NodeProgress.start(2, 3), is_ending=True)
    for rank, status in enumerate((0, -15)):
        progress, action = after_exit(progress, rank, status)
        assert action is Action.NOTHING
    assert progress.is_over and exit_status(progress) == 143


def test_statuses_are_described() -> None:
    assert [describe_status(status) for status in (3, -9, -40)] == ["exit status 3", "signal 9 (SIGKILL)", "signal 40"]
    assert [shell_status(status) for status in (0, 3, -9)] == [0, 3, 137]
