"""The first members wait for the others, but not longer than they may, and not if the job trains already."""

from __future__ import annotations

import threading
import time

import pytest

from colossal_hetero.plugin.elastic.members import a_world_has_formed, wait_for_the_first_world
from tests.unit.plugin.elastic.joining.test_new_kinds import SharedBoard


def test_all_go_on_when_the_last_one_comes(capsys: pytest.CaptureFixture[str]) -> None:
    board, ended = SharedBoard(), []

    def come() -> None:
        wait_for_the_first_world(board, 3, 600.0)
        ended.append(time.monotonic())

    threads = [threading.Thread(target=come, daemon=True) for _ in range(3)]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.5)
    assert ended == []
    threads[2].start()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 3  # long before the limit
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "colossal_hetero: 3 of 3 members are there"
    assert sum("3 of 3" in line for line in said) == 1  # only the first one speaks
    assert "of 3 members are there; waiting up to 600 s for the others" in said[0]


def test_it_ends_without_the_others() -> None:
    board = SharedBoard()
    wait_for_the_first_world(board, 3, 0.3)
    wait_for_the_first_world(board, 3, 0.0)
    waiting = threading.Thread(target=wait_for_the_first_world, args=(board, 9, 60.0))
    waiting.start()
    a_world_has_formed(board)
    waiting.join(30)
    assert not waiting.is_alive()
    wait_for_the_first_world(board, 9, 60.0)
