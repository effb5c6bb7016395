"""The patches that let Colossal-AI run on a CPU: what each of them computes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from colossalai.shardformer.layer import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Row,
    _operation,
)
from colossalai.shardformer.layer.utils import Randomizer
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.harness import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for hosts without a GPU")


def send_without_a_receiver(messages: int) -> list[list[float]]:
    """Both ranks post all their sends, wait for them, reuse the tensor, and only then receive."""
    peer = 1 - dist.get_rank()
    outgoing = torch.zeros(3)
    for number in range(messages):
        outgoing.fill_(10 * dist.get_rank() + number)
        for request in p2p.dist.batch_isend_irecv([p2p.dist.P2POp(dist.isend, outgoing, peer)]):
            request.wait()
    outgoing.fill_(-1)
    received = []
    for _ in range(messages):
        incoming = torch.empty(3, requires_grad=True)
        (request,) = p2p.dist.batch_isend_irecv([p2p.dist.P2POp(dist.irecv, incoming, peer)])
        request.wait()
        request.wait()
        received.append(incoming.tolist())
    p2p.dist.batch_isend_irecv.__self__.wait_for_sends()
    return received


def test_a_send_does_not_wait_for_its_receiver() -> None:
    from_1, from_0 = run_ranks(2, send_without_a_receiver, 3, timeout_seconds=30)
    assert from_0 == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert from_1 == [[10.0] * 3, [11.0] * 3, [12.0] * 3]


def scatter_sums(asynchronous: bool) -> tuple[list[float], list[float]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = [torch.arange(6.0).view(2, 3) + 10 * rank + 100 * piece for piece in range(ranks)]
    output = torch.empty(2, 3)
    work = _operation.dist.reduce_scatter(output, pieces, async_op=asynchronous)
    if work is not None:
        work.wait()
    total = torch.stack(pieces)
    dist.all_reduce(total)
    return output.tolist(), total[rank].tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_reduce_scatter(asynchronous: bool) -> None:
    for output, expected in run_ranks(3, scatter_sums, asynchronous):
        assert output == expected


ROW_LAYERS = {
    "linear": (Linear1D_Row, {}),
    "fused": (FusedLinear1D_Row, {"split_sizes": [4, 4]}),
    "gpt2": (GPT2FusedLinearConv1D_Row, {}),
}


def scatter_each(cases: list[tuple[torch.dtype, list[int] | None]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By case, what this rank gets of the sum of all ranks' tensors, and the sum itself by ``all_reduce``."""
    results = []
    for dtype, ranks in cases:
        group = None if ranks is None else dist.new_group(ranks)
        size, own = dist.get_world_size() if ranks is None else len(ranks), dist.get_rank()
        if ranks is not None and own not in ranks:
            results.append((torch.zeros(0), torch.zeros(0)))
            continue
        values = torch.randn(size * 5, generator=torch.Generator().manual_seed(own)).to(dtype)
        before, output = values.clone(), torch.empty(5, dtype=dtype)
        assert dist.reduce_scatter_tensor(output, values, group=group) is None
        assert torch.equal(values, before)
        whole = values.double()
        dist.all_reduce(whole, group=group)
        results.append((output.double(), whole.view(size, 5)[own if ranks is None else ranks.index(own)]))
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_of_one_tensor(ranks: int) -> None:
    cases = [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, [ranks - 2, ranks - 1]),
    ]
    for of_rank in run_ranks(ranks, scatter_each, cases):
        for (dtype, _), (output, expected) in zip(cases, of_rank, strict=True):
            tolerance = 1e-6 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


def build_row_layer(kind: str) -> tuple[list[float], float]:
    """Build a row-parallel layer from its sizes. Returns its bias, and a random number that is drawn afterwards."""
    layer, arguments = ROW_LAYERS[kind]
    torch.manual_seed(5)
    bias = layer(8, 6, process_group=dist.group.WORLD, **arguments).bias
    return bias.tolist(), torch.rand(1).item()


@pytest.mark.parametrize("kind", ROW_LAYERS)
def test_row_layers_have_the_same_random_bias_on_all_ranks(kind: str) -> None:
    (bias_0, next_0), (bias_1, next_1) = run_ranks(2, build_row_layer, kind)
    assert any(bias_0)
    assert bias_0 == bias_1
    torch.manual_seed(5)
    assert next_0 == next_1 == torch.rand(1).item()


def gather_output(kind: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Output and input gradient of a layer, then those of the fused parallel layer, which gathers its output."""
    torch.manual_seed(6)
    native, layer = FUSED_LAYERS[kind]
    plain = native()
    x = torch.randn(3, 5, requires_grad=True)
    weights = torch.randn(3, 16)
    results = []
    for product in (
        plain,
        layer.from_native_module(
            copy.deepcopy(plain), process_group=dist.group.WORLD, gather_output=True, split_sizes=[4, 8, 4]
        ),
    ):
        output = product(x)
        (gradient,) = torch.autograd.grad((output * weights).sum(), x)
        results += [output.flatten().tolist(), gradient.flatten().tolist()]
    return tuple(results)


FUSED_LAYERS = {
    "linear": (lambda: nn.Linear(5, 16), FusedLinear1D_Col),
    "gpt2": (lambda: Conv1D(16, 5), GPT2FusedLinearConv1D_Col),
}


@pytest.mark.parametrize("kind", FUSED_LAYERS)
def test_fused_layers_gather_their_output(kind: str) -> None:
    for expected, expected_gradient, output, gradient in run_ranks(2, gather_output, kind):
        assert output == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert gradient == pytest.approx(expected_gradient, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("enable_cpu", [False, True])
def test_randomizer_and_global_random_state_are_separate(enable_cpu: bool) -> None:
    torch.manual_seed(1)
    randomizer = Randomizer(seed=2)
    with randomizer.fork_rng(enable_cpu=enable_cpu):
        first = torch.rand(4)
    outside = torch.rand(4)
    with randomizer.fork_rng(enable_cpu=enable_cpu):
        second = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(outside, torch.rand(4))
    torch.manual_seed(2)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(4), torch.rand(4)]))
