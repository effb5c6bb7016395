"""Collectives of a GPU's tensors over Gloo, with a pretended GPU: Gloo must not get its tensors, but copies of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossal_hetero.colossalai_support import gpu_over_gloo
from colossal_hetero.colossalai_support.cpu import reduce_scatter, sent_directly
from colossal_hetero.colossalai_support.gpu_over_gloo import batch_through_host, through_host
from colossal_hetero.layers.transport import Transport
from colossal_hetero.plugin.zero.zero_stages import plugin_of_stage
from tests.support.harness import run_ranks
from tests.support.training import batch, loss_of, tiny_vit


class OnGpu(Tensor):
    """A tensor that Gloo must not get to see."""


def on_gpu(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def needs_host(tensor: Tensor, group: Any) -> bool:
    return isinstance(tensor, OnGpu)


def refusing(collective: Callable[..., Any]) -> Callable[..., Any]:
    """``collective`` of Gloo, which does not take tensors of a GPU."""

    @wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, OnGpu) for leaf in tree_leaves((args, kwargs))):
            raise RuntimeError(f"{collective.__name__}: not supported for tensors of a GPU")
        return collective(*args, **kwargs)

    return run


def through(collective: Callable[..., Any]) -> Callable[..., Any]:
    return through_host(refusing(collective), needs_host)


def numbers(values: Any) -> list[list[float]]:
    return [value.as_subclass(Tensor).tolist() for value in tree_leaves(values)]


def every_collective(has_gpu: bool) -> dict[str, list[list[float]]]:
    """The results of all collectives of two ranks, of which rank 0 has a GPU if ``has_gpu``."""
    rank = dist.get_rank()
    has_gpu = has_gpu and rank == 0
    tensor = on_gpu if has_gpu else (lambda *values: torch.tensor(values))
    call = through if has_gpu else (lambda collective: collective)
    own, other = tensor(rank + 1.0, rank + 2.0), tensor(rank * 10.0, 5.0)
    results: dict[str, Any] = {}

    total = own.clone()
    call(dist.reduce)(total, 0)
    results["reduce"] = total if rank == 0 else []
    gathered = [tensor(0.0, 0.0), tensor(0.0, 0.0)]
    work = call(dist.all_gather)(gathered, own, async_op=True)
    work.wait(), work.wait()
    results["all_gather"] = gathered
    flat = tensor(0.0, 0.0, 0.0, 0.0)
    call(dist.all_gather_into_tensor)(flat, own)
    results["all_gather_into_tensor"] = flat
    half = tensor(0.0)
    call(sent_directly(dist.reduce_scatter_tensor))(half, own)
    results["reduce_scatter_tensor"] = half
    summed = tensor(0.0)
    call(reduce_scatter)(summed, list(own.split(1)))
    results["reduce_scatter"] = summed
    part = tensor(0.0, 0.0)
    call(dist.scatter)(part, [own, other] if rank == 0 else None)
    results["scatter"] = part
    parts = [tensor(0.0, 0.0), tensor(0.0, 0.0)]
    call(dist.gather)(own, parts if rank == 0 else None)
    results["gather"] = parts if rank == 0 else []
    received = tensor(0.0, 0.0)
    if rank == 0:
        call(dist.send)(own, 1)
    else:
        assert call(dist.recv)(received) == 0
    results["send"] = received
    return {name: numbers(value) for name, value in results.items()}


def exchange() -> tuple[list[list[float]], int]:
    """Both ranks send each other two messages at once, rank 0 from a GPU. Also the number of handles."""
    rank = dist.get_rank()
    functions: dict[str, Any] = {}
    if rank == 0:
        functions = {name: through(getattr(dist, name)) for name in ("isend", "irecv")}
        functions["batch_isend_irecv"] = batch_through_host(refusing(dist.batch_isend_irecv), needs_host)
    tensor = on_gpu if rank == 0 else (lambda *values: torch.tensor(values))
    sent, received = [tensor(rank + 1.0), tensor(2.0, rank)], [tensor(0.0), tensor(0.0, 0.0)]
    with ExitStack() as stack:
        for module in (dist, dist.distributed_c10d):  # which compares the operations of a batch with its own functions
            for name, function in functions.items():
                stack.enter_context(patch.object(module, name, function))
        transport = Transport(dist.group.WORLD)
        started = transport.exchange([(1 - rank, each) for each in sent], [(1 - rank, each) for each in received])
        started.wait()
    return numbers(received), sum(not each._works for each in started)


def train(stage: int, has_gpu: bool) -> tuple[list[float], int]:
    """Losses of steps at a ZeRO stage, and how many tensors went through the host, as those of a GPU on rank 0 do."""
    copied = 0

    def count(tensor: Tensor, group: Any) -> bool:
        nonlocal copied
        copied += 1
        return True

    if has_gpu and dist.get_rank() == 0:
        for name in filter(partial(hasattr, dist), gpu_over_gloo.OUTPUTS):
            gpu_over_gloo._replace(name, through_host(getattr(dist, name), count))
        gpu_over_gloo._replace("batch_isend_irecv", batch_through_host(dist.batch_isend_irecv, count))
    model = tiny_vit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, *_ = plugin_of_stage(stage, "fp32", 0.0, {}).configure(model, optimizer)
    losses = []
    for number in range(3):
        images, labels = batch(number, replica=dist.get_rank())
        loss = loss_of(model(images), labels)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, copied


def run_all() -> dict[str, Any]:
    """Everything, with the patches of training last, because they stay."""
    found: dict[str, Any] = {"with": every_collective(True), "without": every_collective(False), "messages": exchange()}
    return found | {(stage, has_gpu): train(stage, has_gpu) for has_gpu in (False, True) for stage in (1, 2)}


def test_a_rank_with_a_gpu_works_with_one_that_has_none() -> None:
    """Collectives and training give the same as without a GPU, and messages are started in order."""
    first, second = run_ranks(2, run_all)
    for found in (first, second):
        assert found["with"] == found["without"]
        assert all(found[stage, True][0] == found[stage, False][0] for stage in (1, 2))
    assert first["with"]["reduce"] == [[3.0, 5.0]] and second["with"]["send"] == [[1.0, 2.0]]
    assert (first["messages"], second["messages"]) == (([[2.0], [2.0, 1.0]], 2), ([[1.0], [2.0, 0.0]], 2))
    assert all(first[stage, True][1] > 0 and second[stage, True][1] == 0 for stage in (1, 2))
