"""Processes that join: who measures a kind of device, who waits for the first world, and for how long."""

from __future__ import annotations

import threading
import time

import pytest

from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.plugin.elastic.members import a_world_has_formed, own_kind, wait_for_the_first_world
from colossal_hetero.plugin.elastic.planning import KnownKinds
from tests.support.machines import Nodes, machines
from tests.unit.planner.profile.test_fitted_profiles import profile


class SharedBoard:
    """A board of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[str, str] = {}
        self._numbers: dict[str, int] = {}

    def published(self, name: str) -> str | None:
        return self._texts.get(name)

    def publish(self, name: str, text: str) -> None:
        self._texts[name] = text

    def count(self, name: str, number: int) -> int:
        with self._lock:
            self._numbers[name] = self._numbers.get(name, 0) + number
            return self._numbers[name]


def test_of_processes_that_come_together_one_measures() -> None:
    board, measurements = SharedBoard(), []

    def measure() -> ModelProfile:
        measurements.append(threading.get_ident())
        time.sleep(0.5)
        return profile("measured")

    known = [KnownKinds(profile("one"), board, measure, 30.0) for _ in range(4)]
    threads = [threading.Thread(target=each.learn, args=("new",)) for each in known]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measurements) == 1
    assert all(each.with_kinds({"one", "new"}).devices == ("one", "new") for each in known)
    # A member of which the profile was enough finds it too, when the newcomer is in its world.
    assert KnownKinds(profile("one"), board, None, 30.0).with_kinds({"one"}).devices == ("one",)
    assert KnownKinds(profile("one"), board, None, 30.0).with_kinds({"new"}).devices == ("one", "new")


def test_after_a_failure_and_after_a_death_the_next_one_measures() -> None:
    board = SharedBoard()

    def fails() -> ModelProfile:
        raise MemoryError("too large")

    with pytest.raises(ValueError, match="new, is not in the profile of model, and measuring it has failed: MemoryE"):
        KnownKinds(profile("one"), board, fails, 30.0).learn("new")
    assert board.count("layers of new/measuring", 0) == 0  # nobody waits for the one that has failed
    KnownKinds(profile("one"), board, lambda: profile("measured"), 30.0).learn("new")
    assert board.count("layers of new/measuring", 0) == 0
    board.count("layers of other/measuring", 1)  # by a process that has died since
    known = KnownKinds(profile("one"), board, lambda: profile("measured"), 0.5)
    known.learn("other")
    assert known.with_kinds({"new", "other"}).devices == ("one", "new", "other")


def test_what_another_process_publishes_between_two_looks_is_not_measured_again() -> None:
    class LateBoard(SharedBoard):
        def count(self, name: str, number: int) -> int:
            # The other process has just finished: it publishes, and counts itself out.
            self.publish("layers of new", profile("measured").model_dump_json(by_alias=True))
            return super().count(name, number)

    def measure() -> ModelProfile:
        raise AssertionError("measured again")

    board = LateBoard()
    known = KnownKinds(profile("one"), board, measure, 30.0)
    known.learn("new")
    assert known.with_kinds({"new"}).devices == ("one", "new")
    assert board.count("layers of new/measuring", 0) == 0


def test_what_was_measured_must_be_the_model() -> None:
    board = SharedBoard()
    with pytest.raises(ValueError, match="layers 5 instead of 4"):
        KnownKinds(profile("one"), board, lambda: profile("measured", layers=5), 30.0).learn("new")
    assert board.published("layers of new") is None


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
