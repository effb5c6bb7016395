"""Replicas that are not alike: groups, buckets of gradients, and what the agreement on a step costs a GPU."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from colossal_hetero.plugin.replicas.replica_gradients import (
    Commit,
    HeldParameter,
    ReplicaGradients,
    SharedParameters,
    divide_into_buckets,
    exchange,
)
from colossal_hetero.plugin.zero.gradient_sums import GradientBucket


def held(names: list[str], size: int = 4, dtype: str = "float32") -> list[HeldParameter]:
    return [HeldParameter(name, size, dtype) for name in names]


def test_a_bucket_ends_at_its_size_and_at_another_type() -> None:
    parameters = [*held(["a"], 60), *held(["b"], 50), *held(["c"], 500), *held(["d"], 1, "float16"), *held(["e"], 1)]
    buckets = divide_into_buckets([*"abcde"], {0: parameters, 1: parameters}, 110)
    assert [bucket.names for bucket in buckets] == [("e",), ("d",), ("c",), ("b", "a")]


def test_ranks_with_other_models_are_named() -> None:
    with pytest.raises(ValueError, match=r"rank 3 holds 5 elements .* of b, but rank 1 4"):
        divide_into_buckets(["a", "b"], {1: held(["b"]), 3: held(["b"], 5)}, 10)
    with pytest.raises(ValueError, match="c are not in the model"):
        divide_into_buckets(["a", "b"], {1: held(["c"])}, 10)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 30),
)
def test_no_rank_waits_for_a_sum_that_never_starts(sizes: list[int], cuts: list[list[int]], limit: int) -> None:
    """Ranks that start their buckets one after the other, and wait for each, come to the end."""
    order = [str(number) for number in range(len(sizes))]
    ranks: dict[int, list[HeldParameter]] = {}
    for replica in cuts:
        bounds = sorted({0, len(sizes), *(cut for cut in replica if cut < len(sizes))})
        for start, stop in pairwise(bounds):
            names = order[start:stop] + (["0"] if stop == len(sizes) and start > 0 else [])  # a tied weight
            ranks[len(ranks)] = [HeldParameter(name, sizes[int(name)], "float32") for name in names]
    buckets = divide_into_buckets(order, ranks, limit)
    holders = defaultdict(set)
    for rank, parameters in ranks.items():
        for parameter in parameters:
            holders[parameter.name].add(rank)
    for name in order:
        assert [set(bucket.ranks) for bucket in buckets if name in bucket.names] == [holders[name]]
    queues = {rank: [bucket for bucket in buckets if rank in bucket.ranks] for rank in ranks}
    while any(queues.values()):
        ready = [
            queue[0]
            for queue in queues.values()
            if queue and all(queues[rank][0] == queue[0] for rank in queue[0].ranks)
        ]
        assert ready
        for rank in ready[0].ranks:
            queues[rank].pop(0)


# Commit -------------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A world of one rank; a list with an element for each message that the host reads."""
    found: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda message: None)
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: found.append(1) or tolist(tensor))
    return found


def gradients_of(parameters: list[Parameter], used: int) -> ReplicaGradients:
    """The first ``used`` parameters got a gradient."""
    numbers = {id(each): number for number, each in enumerate(parameters)}
    shared = SharedParameters(numbers, len(parameters), (GradientBucket(Mock(), tuple(parameters)),))
    gradients = ReplicaGradients(shared, Mock(), lambda bucket: lambda: None, sharded=False, early=False)
    for number, each in enumerate(parameters):
        each.grad = torch.full_like(each, number + 0.5) if number < used else None
    gradients.sums.used = {id(each) for each in parameters[:used]}
    return gradients


def test_a_message_is_read_only_if_it_is_used(reads: list[int]) -> None:
    parameters = [Parameter(torch.zeros(2, 3)) for _ in range(20)]
    for used, needs_norm, is_read in ((20, False, False), (20, True, True), (19, False, True)):
        reads.clear()
        gradients = gradients_of(parameters, used)
        commit = gradients.commit(lambda parameter: parameter.grad, needs_norm)
        assert len(reads) == is_read
        assert [
            number for number in range(20) if any(parameters[number] is each for each in gradients.unused(commit))
        ] == (list(range(used, 20)))
        norm = math.sqrt(sum(6 * (number + 0.5) ** 2 for number in range(used)))
        assert commit.gradient_norm == (pytest.approx(norm, rel=1e-14) if needs_norm else 0)
        assert not commit.overflow


def test_kernels_do_not_grow_with_parameters(reads: list[int]) -> None:
    counts = []
    for number in (5, 50):
        gradients = gradients_of([Parameter(torch.zeros(2, 3)) for _ in range(number)], number)
        with Operations() as operations:
            gradients.commit(lambda parameter: parameter.grad, True)
        del operations.counts["detach"]  # no kernel
        counts.append(operations.counts)
    assert counts[0] == counts[1] and counts[0]["_foreach_norm"] == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_an_overflow(reads: list[int], bad: float) -> None:
    parameters = [Parameter(torch.zeros(3)) for _ in range(3)]
    gradients = gradients_of(parameters, 3)
    assert parameters[1].grad is not None
    parameters[1].grad[2] = bad
    assert gradients.commit(lambda parameter: parameter.grad, True) == Commit(math.inf, True, frozenset())


def test_a_rank_that_counts_no_gradients_takes_part(reads: list[int]) -> None:
    gradients = gradients_of([Parameter(torch.zeros(3))], 0)
    assert gradients.commit(lambda parameter: parameter.grad, True) == Commit(0.0, False, frozenset({0}))
    assert exchange(torch.tensor(4.0).double(), [True, False], words=[2.0, 1.0]) == Commit(
        2, False, frozenset({1}), (2, 1)
    )
