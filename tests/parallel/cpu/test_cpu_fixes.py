"""The patches that let Colossal-AI run on a CPU: what each of them computes."""

from __future__ import annotations

import copy
from typing import Any

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


def build_row_layer(kind: str) -> tuple[list[float], float]:
    """Build a row-parallel layer from its sizes. Returns its bias, and a random number that is drawn afterwards."""
    layer, arguments = ROW_LAYERS[kind]
    torch.manual_seed(5)
    bias = layer(8, 6, process_group=dist.group.WORLD, **arguments).bias
    return bias.tolist(), torch.rand(1).item()


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


def run_two() -> dict[str, Any]:
    return dict(
        sends=send_without_a_receiver(3),
        rows=[build_row_layer(kind) for kind in ROW_LAYERS],
        fused=[gather_output(kind) for kind in FUSED_LAYERS],
    )


def test_sends_and_layers() -> None:
    """A send does not wait for its receiver; row layers have the same random bias on all ranks; fused layers gather."""
    first, second = run_ranks(2, run_two)
    assert second["sends"] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert first["sends"] == [[10.0] * 3, [11.0] * 3, [12.0] * 3]
    torch.manual_seed(5)
    drawn = torch.rand(1).item()
    for (bias_0, next_0), (bias_1, next_1) in zip(first["rows"], second["rows"], strict=True):
        assert any(bias_0) and bias_0 == bias_1
        assert next_0 == next_1 == drawn
    for expected, expected_gradient, output, gradient in first["fused"] + second["fused"]:
        assert output == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert gradient == pytest.approx(expected_gradient, rel=1e-5, abs=1e-6)


def run_scatters() -> tuple[list[tuple[list[float], list[float]]], list[tuple[torch.Tensor, torch.Tensor]]]:
    ranks = dist.get_world_size()
    cases = [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, [ranks - 2, ranks - 1]),
    ]
    return [scatter_sums(asynchronous) for asynchronous in (False, True)], scatter_each(cases)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter(ranks: int) -> None:
    """Of lists, and of one tensor: in single and half precision, and over a part of the ranks."""
    for of_lists, of_tensors in run_ranks(ranks, run_scatters):
        assert all(output == expected for output, expected in of_lists)
        for tolerance, (output, expected) in zip((1e-6, 0.05, 0.05, 1e-6), of_tensors, strict=True):
            torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)


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
