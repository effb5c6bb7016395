"""Workers find each other in a store with the keys of former worlds."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from colossal_hetero.elastic.handshake import Greeting, find_each_other


class Shared:
    """A store of torch that several threads use."""

    def __init__(self) -> None:
        self._store, self._lock = HashStore(), threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._store.set(key, value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return self._store.check(keys)


def meet(store: Shared, nodes: list[str], late: int) -> list[Greeting]:
    """A world whose worker number ``late`` comes late."""
    found: dict[int, Greeting] = {}

    def worker(rank: int) -> None:
        time.sleep(0.2 * (rank == late))
        found[rank] = find_each_other(store, rank, len(nodes), nodes[rank], 20.0)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(nodes))]


def test_worlds_one_after_another_with_each_worker_late_once() -> None:
    store, tokens = Shared(), set()
    for world, nodes in enumerate([["a"], ["a", "b", "c"], ["c", "a", "b"], ["b", "a"], ["a", "c", "b"], ["b", "c"]]):
        greetings = meet(store, nodes, late=world % len(nodes))
        assert {greeting.nodes for greeting in greetings} == {tuple(nodes)}
        (token,) = {greeting.token for greeting in greetings}
        tokens.add(token)
    assert len(tokens) == 6


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_does_not_come_is_waited_for_up_to_the_limit(rank: int) -> None:
    store = Shared()
    meet(store, ["a", "b"], late=0)
    with pytest.raises(RuntimeError, match=rf"not all of 2 workers came within 0.3 s \(this is rank {rank}\)"):
        find_each_other(store, rank, 2, "a", 0.3)
