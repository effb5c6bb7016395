"""Groups of a replica, and buckets of gradients: the same on all holders, in one order, each parameter in one."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.plugin.replicas.replica_gradients import HeldParameter, divide_into_buckets
from colossal_hetero.plugin.replicas.unequal_replicas import groups_of


def test_groups_of_a_replica() -> None:
    assert set(groups_of([(0, 1), (2, 3), (4, 5)])) == {
        *((0, 1), (2, 3), (4, 5)),  # tensor parallel
        *((0,), (1,), (2,), (3,), (4,), (5,)),
        *((0, 2, 4), (1, 3, 5)),  # pipelines
        *((0, 4), (1, 5)),  # stages that share weights
        (0, 1, 2, 3, 4, 5),
    }


def held(names: list[str], size: int = 4, dtype: str = "float32") -> list[HeldParameter]:
    return [HeldParameter(name, size, dtype) for name in names]


def test_a_bucket_ends_at_its_size_and_at_another_type() -> None:
    parameters = [*held(["a"], 60), *held(["b"], 50), *held(["c"], 500), *held(["d"], 1, "float16")]
    buckets = divide_into_buckets([*"abcd"], {0: parameters, 1: parameters}, 110)
    assert [bucket.names for bucket in buckets] == [("d",), ("c",), ("b", "a")]


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
