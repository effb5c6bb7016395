"""When sums of gradients start, buckets of unequal replicas, agreement on a step, parameters that arrive late."""

import copy
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from colossal_hetero.data_parallel.unsummed_steps import GradientGuard
from colossal_hetero.plugin.replicas.replica_gradients import (
    HeldParameter,
    ReplicaGradients,
    SharedParameters,
    divide_into_buckets,
)
from colossal_hetero.plugin.zero import late_parameters
from colossal_hetero.plugin.zero.gradient_sums import GradientBucket, GradientSums
from colossal_hetero.plugin.zero.late_parameters import LateParameter, LateParameters, UpdatedParameter
from tests.support.fake_cuda import FakeCuda, FakeEvent, FakeStream


class RecordedSums:
    """Doubles gradients, as if another rank had the same, and records the order of starts."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: dict[int, str] = {}

    def start(self, bucket: GradientBucket) -> Callable[[], None]:
        label = "".join(self.names[id(each)] for each in bucket.parameters)
        self.events.append(f"start {label}")

        def finish() -> None:
            self.events.append(f"finish {label}")
            for parameter in bucket.parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else 2 * parameter.grad

        return finish


def three_layers(early: bool = True, one_group: bool = False) -> tuple[nn.Sequential, GradientSums, RecordedSums]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    recorded = RecordedSums()
    for name, layer in zip("abc", model, strict=True):
        recorded.names[id(layer.weight)] = name
        layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: recorded.events.append(f"gradient {name}"))
    group = Mock(**{"size.return_value": 2})
    buckets = [GradientBucket(group, (model[2].weight, model[1].weight)), GradientBucket(group, (model[0].weight,))]
    watched = list(model.parameters()) if early else []
    return model, GradientSums(buckets, recorded.start, watched, one_group), recorded


def backward(model: nn.Module, times: int, sums: GradientSums | None = None) -> None:
    for _ in range(times):
        with nullcontext() if sums is None else sums.one_pass():
            model(torch.ones(1, 2)).sum().backward()


def check_twice(model: nn.Sequential, run: Callable[[nn.Sequential], object]) -> None:
    alone = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    alone.load_state_dict(model.state_dict())
    run(alone)
    for layer, same in zip(model, alone, strict=True):
        torch.testing.assert_close(layer.weight.grad, 2 * same.weight.grad)


def checkpointed(model: nn.Sequential, times: int) -> None:
    """A backward pass through the first layer, in so many reentrant checkpoints, and through the others."""
    values = torch.ones(1, 2, requires_grad=True)
    for _ in range(times):
        values = checkpoint(model[0], values, use_reentrant=True)
    model[1:](values).sum().backward()


def test_a_gradient_after_the_start_is_refused() -> None:
    model, sums, _ = three_layers()
    with sums.passes(lambda: 2):
        for times in (2, 3):
            is_refused = pytest.raises(RuntimeError, match="overlap_communication=False")
            with is_refused if times == 3 else nullcontext(), sums.one_pass():
                checkpointed(model, times)


def test_over_one_group_sums_start_in_the_first_pass_and_what_comes_late_is_kept() -> None:
    model, sums, recorded = three_layers(one_group=True)
    weight, started = model[0].weight, []
    for _ in range(2):
        recorded.events.clear()
        with sums.passes(lambda: 1), sums.one_pass():
            checkpointed(model, 2)
            started.append(recorded.events.index("start a"))
            assert recorded.events.count("start a") == 1
            sums.finish()
        late, sums.late = set(sums.late), set()
        assert late == ({id(weight)} if len(started) == 1 else set())
        sums.drop()
        model.zero_grad()
    assert started[0] < started[1]  # the second pass knows that two gradients come


def test_gradients_that_are_summed_already_are_not_summed_again() -> None:
    model, sums, _ = three_layers()
    for _ in range(2):
        with sums.passes(lambda: 1):
            backward(model, 1)
            sums.finish()
    with sums.passes(None):  # accumulates only
        backward(model, 1)
    with sums.passes(lambda: 1):
        backward(model, 1)
        sums.finish()
    check_twice(model, lambda alone: backward(alone, 4))


def held(names: list[str], size: int = 4, dtype: str = "float32") -> list[HeldParameter]:
    return [HeldParameter(name, size, dtype) for name in names]


def test_a_bucket_ends_at_its_size_and_at_another_type() -> None:
    parameters = [*held(["a"], 60), *held(["b"], 50), *held(["c"], 500), *held(["d"], 1, "float16"), *held(["e"], 1)]
    buckets = divide_into_buckets([*"abcde"], {0: parameters, 1: parameters}, 110)
    assert [bucket.names for bucket in buckets] == [("e",), ("d",), ("c",), ("b", "a")]


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
        first = [queue[0] for queue in queues.values() if queue]
        ready = [bucket for bucket in first if all(queues[rank][0] == bucket for rank in bucket.ranks)]
        assert ready
        for rank in ready[0].ranks:
            queues[rank].pop(0)


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


def started(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> tuple[LateParameters, list[Parameter]]:
    """A large parameter and two small ones, whose gathers have started."""

    class Work:
        def wait(self) -> None:
            torch.cuda.current_stream().wait_stream("gather")  # type: ignore[arg-type]

    def gather(output: Tensor, shard: Tensor, **_: Any) -> Work:
        output.copy_(shard)
        return Work()

    monkeypatch.setattr(late_parameters, "SMALL", 4)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    parameters = [Parameter(torch.zeros(size)) for size in (5, 2, 3)]
    late = LateParameters()
    start(late, parameters, 1.0)
    return late, parameters


def start(late: LateParameters, parameters: list[Parameter], value: float) -> None:
    updated = [UpdatedParameter(each, torch.full_like(each.data, value), each.data) for each in parameters]
    late.start(updated, None)  # type: ignore[arg-type]


def waits(stream: FakeStream) -> list[Any]:
    done, stream.done = stream.done, []
    return [each[1] for each in done if isinstance(each, tuple) and each[1] is not stream]


def test_each_stream_that_reads_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    late, (large, small, other) = started(monkeypatch, cuda)
    monkeypatch.setattr(FakeEvent, "is_reached", False)
    second, third = FakeStream(), FakeStream()
    assert (large + 1).tolist() == [2.0] * 5 and waits(cuda.main) == ["gather"]
    with cuda.on(second):
        assert (small + 1).tolist() == [2.0] * 2 and waits(second) == ["gather"]
        assert torch.equal(large + 1, large.data + 1) and waits(second) == [cuda.main]
    with cuda.on(third):  # reads what others have waited for, in a module
        module = nn.LayerNorm(3)
        module.weight = other
        module(torch.zeros(3))
        assert waits(third) == [second]
        assert torch.equal(copy.deepcopy(large), pickle.loads(pickle.dumps(large))) and waits(third) == [cuda.main]
    assert large.sum().item() == 5 and waits(cuda.main) == []
    monkeypatch.setattr(FakeEvent, "is_reached", True)
    for each in (large, small):
        assert isinstance(each, LateParameter)
        each.sum()
    assert [type(each) for each in (large, small, other)] == [Parameter] * 3
    late.wait()


def test_the_next_step_waits_for_earlier_gathers_before_it_starts_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    late, parameters = started(monkeypatch, cuda)
    monkeypatch.setattr(FakeEvent, "is_reached", False)
    with cuda.on(FakeStream()) as reader:
        for each in parameters:
            each.sum()
    waits(cuda.main)
    late.wait()
    assert waits(cuda.main) == [reader, reader]
    start(late, parameters, 3.0)
    assert sum(each.sum().item() for each in parameters) == 30
    monkeypatch.setattr(FakeEvent, "is_reached", True)
    late.wait()
    assert [type(each) for each in parameters] == [Parameter] * 3


def test_absent_gradients_are_guarded_without_a_warning() -> None:
    """A warning from the package fails a test; torch 2.15 has one for sparse tensors."""
    model = nn.Linear(2, 3)
    guard = GradientGuard(model.named_parameters())
    guard.close("not summed", fill=True)
    assert all(each.grad is not None for each in model.parameters())
    guard.open()
    assert all(each.grad is None for each in model.parameters())
