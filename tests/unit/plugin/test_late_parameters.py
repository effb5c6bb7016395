"""On a GPU, each stream that reads a parameter waits for its gather, not only the first one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from colossal_hetero.plugin.zero import late_parameters
from colossal_hetero.plugin.zero.late_parameters import LateParameter, LateParameters, UpdatedParameter
from tests.support.fake_cuda import FakeCuda, FakeEvent, FakeStream


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
    """What a stream has waited for since the last call."""
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
