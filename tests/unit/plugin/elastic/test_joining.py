"""Processes that join: their places in the cluster, and who waits for the first world, and for how long."""

from __future__ import annotations

import threading

import pytest

from colossal_hetero.plugin.elastic.members import a_world_has_formed, own_kind, wait_for_the_first_world
from tests.support.machines import Nodes, machines


class SharedBoard:
    """A board of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def count(self, name: str, number: int) -> int:
        with self._lock:
            self._numbers[name] = self._numbers.get(name, 0) + number
            return self._numbers[name]


@pytest.mark.parametrize(
    ("node", "local_rank", "message"),
    [
        ("elsewhere", 0, "node elsewhere, which is not in the cluster file; it has"),
        ("node-1", 2, "number 3 on node node-1, which has 2 devices"),
    ],
)
def test_places_that_the_cluster_does_not_have(node: str, local_rank: int, message: str) -> None:
    cluster = machines(Nodes("InfiniBand", (1, 2)))
    with pytest.raises(ValueError, match=message):
        own_kind(cluster, node, local_rank)


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
