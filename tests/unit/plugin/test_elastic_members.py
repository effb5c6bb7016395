"""Members of an elastic job: their memory, the first world, and evaluations in which one is lost."""

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import product
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.elastic.held_layers import Evaluations, Standing, has_to_repeat, is_joined_inside
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.plugin.elastic.members import FORMED, wait_for_the_first_world
from colossal_hetero.plugin.elastic.planning import with_copied_shards
from tests.support import elastic_jobs


class SharedBoard:
    """A board of threads."""

    def __init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), Counter[str]()

    def count(self, name: str, number: int) -> int:
        with self._lock:
            self._numbers[name] += number
            return self._numbers[name]


def test_memory_of_copied_shards_is_planned() -> None:
    def bytes_of(profile: ModelProfile, shards: int) -> float:
        costs = profile.costs(profile.devices[0], 1, profile.times[0].micro_batch, zero_shards=shards)
        return float(costs.state_bytes.sum()) / float(costs.bucket_bytes)

    # Parameters and gradients, and two of ``shards`` parts of masters and Adam's moments.
    fp32 = elastic_jobs.profile()
    assert [bytes_of(fp32, shards) for shards in (1, 2, 4)] == pytest.approx([4, 2 + 3 / 2, 2 + 3 / 4])
    copied = with_copied_shards(fp32)
    assert [bytes_of(copied, shards) for shards in (1, 2, 3, 4, 8)] == pytest.approx([5, 5, 5, 2 + 3 / 2, 2 + 3 / 4])
    half = fp32.model_copy(update=dict(precision="bf16", state_factor=8.0))
    assert [bytes_of(with_copied_shards(half), shards) for shards in (1, 2, 4)] == pytest.approx([8, 8, 5])


def test_it_ends_without_the_others() -> None:
    board = SharedBoard()
    wait_for_the_first_world(board, 3, 0.3)
    wait_for_the_first_world(board, 3, 0.0)
    waiting = threading.Thread(target=wait_for_the_first_world, args=(board, 9, 60.0))
    waiting.start()
    board.count(FORMED, 1)
    waiting.join(30)
    assert not waiting.is_alive()
    wait_for_the_first_world(board, 9, 60.0)


def standing(evaluations: int, has_results: bool | None) -> Standing:
    return Standing(5, False, None, evaluations, has_results)


def test_who_evaluates_again() -> None:
    """For all that three ranks can have done: afterwards all have finished the same evaluations, and a rank repeats
    only together with all others that are not behind it."""
    inside = [standing(3, False), standing(3, True)]
    for ranks in product(inside, repeat=3):  # nobody is ahead
        repeats = {has_to_repeat(each, ranks) for each in ranks}
        assert repeats == {not all(each.has_results for each in ranks)}
    ahead = [standing(4, False), standing(4, True)]
    for others in product([standing(3, True), *ahead], repeat=2):  # rank 0 has got the message of evaluation 3
        for first in ahead:
            ranks = (first, *others)
            for each in ranks:
                everyone_has = all(other.evaluations == 4 and other.has_results for other in ranks)
                assert has_to_repeat(each, ranks) == (each.evaluations == 4 and not everyone_has)
    for others in product([standing(3, True), standing(4, None)], repeat=2):  # rank 0 trains already
        ranks = (standing(4, None), *others)
        assert not any(has_to_repeat(each, ranks) for each in ranks)


def test_a_process_that_joins_is_in_no_evaluation() -> None:
    new = Standing(None, False, None)
    for inside in (standing(3, False), standing(3, True)):
        assert is_joined_inside([standing(4, None), inside, new])
        assert not is_joined_inside([standing(4, None), inside])
    assert not is_joined_inside([standing(4, None), new])
    assert not is_joined_inside([new])


def test_the_same_batches_are_drawn_again() -> None:
    evaluations, seen, changes = Evaluations(), list[int](), list[bool]()

    def evaluate(batches: Iterator[int]) -> dict:
        assert not torch.is_grad_enabled()
        seen.append(next(batches))
        if len(seen) in (2, 3):
            raise RuntimeError("Connection closed by peer")
        return {"loss": seen[-1]}

    def change(error: RuntimeError) -> bool:
        changes.append(torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
        assert evaluations.has_results == (len(changes) == 3)
        return len(changes) < 3

    with patch("torch.distributed.barrier") as barrier, torch.inference_mode():
        batches = iter(range(9))
        assert evaluations.run(evaluate, batches, change) == {"loss": 0}
        assert evaluations.run(evaluate, batches, change) == {"loss": 1}
        barrier.side_effect = RuntimeError("Connection closed by peer")
        assert evaluations.run(evaluate, batches, change) == {"loss": 2}
    assert seen == [0, 1, 1, 1, 2] and changes == [True] * 3
    assert (evaluations.done, evaluations.has_results) == (3, None)
