"""What the patches compute that let Colossal-AI run on a CPU; groups of Gloo; and collectives of a GPU's tensors over
Gloo, with a pretended GPU: Gloo must not get its tensors, but copies of them."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from colossalai.shardformer.layer import FusedLinear1D_Col, GPT2FusedLinearConv1D_Col
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from colossal_hetero.balance.host_messages import make_groups
from colossal_hetero.colossalai_support import gpu_over_gloo
from colossal_hetero.colossalai_support.cpu import reduce_scatter, sent_directly
from colossal_hetero.colossalai_support.gpu_over_gloo import batch_through_host, through_host
from colossal_hetero.common.ranks import world_timeout
from colossal_hetero.layers.transport import Transport
from colossal_hetero.plugin.zero.zero_stages import plugin_of_stage
from tests.support.checks import on
from tests.support.harness import run_ranks
from tests.support.training import batch, loss_of, make_step, tiny_vit


@on(2)
def a_send_does_not_wait_for_its_receiver() -> None:
    """Both ranks post all their sends, wait for them, reuse the tensor, and only then receive."""
    rank, outgoing = dist.get_rank(), torch.zeros(3)
    for number in range(3):
        outgoing.fill_(10 * rank + number)
        for request in p2p.dist.batch_isend_irecv([p2p.dist.P2POp(dist.isend, outgoing, 1 - rank)]):
            request.wait()
    outgoing.fill_(-1)
    for number in range(3):
        incoming = torch.empty(3, requires_grad=True)
        (request,) = p2p.dist.batch_isend_irecv([p2p.dist.P2POp(dist.irecv, incoming, 1 - rank)])
        request.wait()
        request.wait()
        assert incoming.tolist() == [10.0 * (1 - rank) + number] * 3
    p2p.dist.batch_isend_irecv.__self__.wait_for_sends()


@on(2)
def fused_layers_gather_their_output() -> None:
    for native, parallel in (
        (lambda: nn.Linear(5, 16), FusedLinear1D_Col),
        (lambda: Conv1D(16, 5), GPT2FusedLinearConv1D_Col),
    ):
        torch.manual_seed(6)
        plain = native()
        options = dict(process_group=dist.group.WORLD, gather_output=True, split_sizes=[4, 8, 4])
        layer = parallel.from_native_module(copy.deepcopy(plain), **options)
        x, weights = torch.randn(3, 5, requires_grad=True), torch.randn(3, 16)
        outputs = [product(x) for product in (layer, plain)]
        gradients = [torch.autograd.grad((output * weights).sum(), x) for output in outputs]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for hosts without a GPU")
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


@on(2)
def a_group_is_destroyed_while_its_threads_still_release_tensors() -> None:
    """The thread of a collective releases its many tensors one after the other, while this thread does the same."""
    for _ in range(10):
        group = dist.new_group()
        tensors = [torch.ones(1) for _ in range(2000)]
        group.allreduce(tensors).wait()
        del tensors
        dist.destroy_process_group(group)
        del group


def timeouts() -> list[timedelta | None]:
    found = [world_timeout()]
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=7))
    groups = make_groups(dist.new_group([0]))
    options = [group._get_backend(torch.device("cpu")).options for group in (groups.world, groups.migration)]
    return [*found, world_timeout(), *(each._timeout for each in options)]


def test_other_groups_wait_as_long_as_the_default_group() -> None:
    assert run_ranks(1, timeouts) == [[None, *[timedelta(minutes=7)] * 3]]


class OnGpu(Tensor):
    """A tensor that Gloo must not get to see."""


def on_gpu(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


def needs_host(tensor: Tensor, group: Any) -> bool:
    return isinstance(tensor, OnGpu)


def refusing(collective: Callable[..., Any]) -> Callable[..., Any]:
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
        make_step(optimizer, loss)
        losses.append(loss.item())
    return losses, copied


@on(2)
def a_rank_with_a_gpu_works_with_one_that_has_none() -> None:
    is_first = dist.get_rank() == 0
    found = every_collective(True)
    assert found == every_collective(False)
    assert found["reduce"] == [[3.0, 5.0]] if is_first else found["send"] == [[1.0, 2.0]]
    assert exchange() == (([[2.0], [2.0, 1.0]], 2) if is_first else ([[1.0], [2.0, 0.0]], 2))
    expected = [train(stage, False)[0] for stage in (1, 2)]
    for stage in (1, 2):  # last, because the patches of training stay
        losses, copied = train(stage, True)
        assert losses == expected[stage - 1] and (copied > 0) == is_first, stage
