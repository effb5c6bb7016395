"""Migration is exact: training with it differs from training without it only by the order of summation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from colossalai.tensor.d_tensor import api
from torch import Tensor

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import host_messages
from colossal_hetero.balance.divide import BlockShape, LayerShape, Move, Port, block_ports, column_traffic, divide
from colossal_hetero.balance.plan import BalancePlan, Traffic, Volume
from colossal_hetero.layers.column_migration import COLUMN_EXCHANGES, ColumnMigration
from colossal_hetero.layers.transport import Transport
from colossal_hetero.layers.unit_exchange import UnitExchange
from tests.support.applied_plans import Training
from tests.support.checks import Checks, of_all_ranks
from tests.support.migration_runs import relative_difference
from tests.support.parallel_layers import KINDS, build, inputs, owned
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import BATCH, batch, boost, loss_of, ours, sgd

checks = Checks()

METHODS = ("broadcast-reduce", "scatter-gather", "block")
TOKENS = 5  # four patches and the class token


def plan_for(senders: dict[int, float], ranks: int) -> BalancePlan:
    """A plan in which the ``senders`` migrate these shares of their work, and all other ranks receive equal parts."""
    share = sum(senders.values()) / (ranks - len(senders))
    return BalancePlan(
        resize=(0.0,) * ranks,
        migrate=tuple(senders.get(rank, 0.0) for rank in range(ranks)),
        receive=tuple(0.0 if rank in senders else share for rank in range(ranks)),
    )


def plans(ranks: int) -> Iterator[BalancePlan]:
    """Plans with each rank as the only sender; for more than two ranks also with several senders and uneven parts."""
    for rank in range(ranks):
        yield plan_for({rank: 0.6}, ranks)
    if ranks > 2:
        yield plan_for({0: 0.5, ranks - 1: 0.8}, ranks)
        yield plan_for({rank: 0.3 + 0.1 * rank for rank in range(1, ranks)}, ranks)
        uneven = [0.1 * rank for rank in range(ranks)]
        yield BalancePlan(resize=(0.0,) * ranks, migrate=(sum(uneven), *(0.0,) * (ranks - 1)), receive=tuple(uneven))


@checks.on(2, 4, 2)
@checks.on(3, 3, 1)
def parameters_after_training_are_those_of_training_without_migration(steps: int, depth: int) -> None:
    ranks = dist.get_world_size()
    expected = Training(depth=depth)
    expected.steps(steps)
    for method in METHODS:
        training = Training(method, depth=depth)
        for number, plan in enumerate(plans(ranks)):
            if ranks > 2 and method != METHODS[number % 3] and not IS_THOROUGH:
                continue  # on more ranks each plan is checked in one form
            training.reset()
            training.transport.reset()
            training.applier.apply(plan)
            training.steps(steps)
            assert relative_difference(training.parameters, expected.parameters) <= 1e-5, f"{method}, {plan}"
            assert training.transport.sent["point_to_point"].messages > 0 or method == "broadcast-reduce"


# When weights are sent ------------------------------------------------------------------------------------------------


@checks.on(3)
def the_weights_of_a_block_are_sent_when_the_block_before_starts() -> None:
    """If each block has its own message. The blocks of the second half do not run in the first iteration."""

    def train(training: Training) -> dict[str, Tensor]:
        training.applier.units.begin_pass()
        blocks = training.model.unwrap().blocks
        x = torch.randn(BATCH, TOKENS, 36, generator=torch.Generator().manual_seed(0))
        training.booster.backward(blocks[0](x).square().mean(), training.optimizer)
        training.applier.units.before_step()
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.steps(2)
        return training.parameters

    expected = train(Training())
    training = Training()
    events: list[str] = []
    exchange = training.transport.exchange

    def log_and_exchange(sends: Any, receives: Any) -> Any:
        events.append("post")
        return exchange(sends, receives)

    for number, block in enumerate(training.model.unwrap().blocks):
        block.attn.register_forward_pre_hook(lambda *_, number=number: events.append(f"attention {number}"))
        block.mlp.register_forward_pre_hook(lambda *_, number=number: events.append(f"mlp {number}"))
    ranks = dist.get_world_size()
    with patch("colossal_hetero.layers.unit_exchange.MESSAGE_BYTES", 1):
        training.applier.apply(plan_for({ranks - 1: 0.6}, ranks))
    difference = relative_difference(train(training), expected)
    with patch.object(training.transport, "exchange", log_and_exchange):
        events.clear()
        training.applier.units.begin_pass()
        training.model(batch()[0])
    assert events == ["post", "attention 0", "post", "mlp 0", "post", "attention 1", "post", "mlp 1"]
    assert difference <= 1e-5


def _sums_before_messages() -> list[dict[int, list[int]]]:
    """For several plans in which ranks have a part in different buckets: for each other rank, how many all-reduces this
    rank has launched before each message that it exchanges with that rank in a training iteration."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    training = Training(depth=2)
    exchange, all_reduce = training.transport.exchange, dist.all_reduce
    sums, before = 0, dict[int, list[int]]()

    def log_and_exchange(sends: Any, receives: Any) -> Any:
        for other in {other for other, _ in (*sends, *receives)}:
            before.setdefault(other, []).append(sums)
        return exchange(sends, receives)

    def log_and_sum(*arguments: Any, **options: Any) -> Any:
        nonlocal sums
        sums += 1
        return all_reduce(*arguments, **options)

    found = []
    for seed in range(4):
        random = Random(seed)
        pairs = [random.sample(range(ranks), 2) for _ in training.blocks]
        moves = [
            [Move(sender, receiver, block.units - 1, block.units)]
            for block, (sender, receiver) in zip(training.blocks, pairs, strict=True)
        ]
        kept = [block.units - (sender == rank) for block, (sender, _) in zip(training.blocks, pairs, strict=True)]
        units = UnitExchange(training.transport)
        with (
            patch("colossal_hetero.layers.unit_exchange.MESSAGE_BYTES", 1),
            patch.object(training.transport, "exchange", log_and_exchange),
            patch.object(dist, "all_reduce", log_and_sum),
        ):
            units.assign(training.blocks, moves, kept, [None] * len(kept))
            sums, before = 0, {}
            units.begin_pass()
            images, labels = batch(0)
            loss_of(training.model(images), labels).backward()
            units.end_iteration()
            units.release(training.blocks)
        training.optimizer.zero_grad()
        found.append(before)
    return found


@checks.on(3)
def all_ranks_launch_messages_and_sums_in_one_order() -> None:
    """NCCL demands it of operations of two communicators."""
    of_ranks = of_all_ranks(_sums_before_messages())
    messages = 0
    for rank, found in enumerate(of_ranks):
        for plan, before in enumerate(found):
            for other, sums in before.items():
                messages += len(sums)
                assert of_ranks[other][plan][rank] == sums, (plan, rank, other)
    assert messages > 20


class _Handle:
    """The handle of a batch of messages as NCCL's: one for all of them. Waiting again is allowed."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


@checks.on(2)
def memory_that_nccl_sends_from_is_not_used_again_before_it_has_been_sent() -> None:
    """Waits of a rank that sends and receives, and of one that only sends, which does not wait for its receivers."""
    transport, other, waits = Transport(dist.new_group()), 1 - dist.get_rank(), []
    for receives in ([(other, torch.zeros(1))], []):
        handle = _Handle()
        with patch.object(dist, "batch_isend_irecv", lambda operations, handle=handle: [handle]):
            started = transport.exchange([(other, torch.zeros(1)), (other, torch.zeros(1))], receives)
        for pending in (started.received, started.sent):
            pending.wait()
            waits.append(handle.waits)
    assert waits == [1, 2, 0, 1]


@checks.on(3)
def all_pairs_of_ranks_are_connected_at_boost() -> None:
    messages = []
    batch = dist.batch_isend_irecv

    def recorded(operations: list[dist.P2POp]) -> list[dist.Work]:
        messages.extend((operation.op.__name__, operation.peer) for operation in operations)
        return batch(operations)

    with patch.object(dist, "batch_isend_irecv", recorded):
        boost(ours(BalanceConfig(mode="auto"), tp_size=dist.get_world_size()), None, sgd)
    others = [rank for rank in range(3) if rank != dist.get_rank()]
    assert messages == [(operation, other) for other in others for operation in ("isend", "irecv")]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_messages_take_few_processors_of_a_gpu() -> None:
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        config = host_messages._few_processors(backend).config
        assert (config.min_ctas, config.max_ctas) == (1, host_messages.MIGRATION_CTAS)
    assert host_messages._few_processors("gloo") is None


# Traffic -------------------------------------------------------------------------------------------------------------


def _sent_in_one_step(method: str, plan: BalancePlan) -> tuple[dict[str, tuple[int, int]], Traffic | list[Port]]:
    training = Training(method, depth=1)
    training.applier.apply(plan)
    training.transport.reset()
    training.steps(1)
    sent = {name: (counted.messages, counted.bytes) for name, counted in training.transport.sent.items()}
    ranks = dist.get_world_size()
    if method == "block":
        moves = [divide(block.units, plan).moves for block in training.blocks]
        shapes = [BlockShape(block.units, block.elements_per_unit, len(block.layers)) for block in training.blocks]
        return sent, block_ports(shapes, moves, [0] * len(shapes), ranks, 4)
    expected = Traffic()
    for layer in training.layers.values():
        moves = divide(layer.contraction_columns, plan).moves
        outputs, columns = layer.matrix.shape
        shape = LayerShape(outputs, columns, column_parallel=layer.is_column_parallel)
        expected += column_traffic(shape, moves, BATCH * TOKENS, 1, ranks, method, 4)
    return sent, expected


@checks.on(2, {1: 0.6})
@checks.on(3, {0: 0.5})
@checks.on(4, {1: 0.4, 2: 0.7})
def messages_and_bytes_are_those_of_the_formula(senders: dict[int, float]) -> None:
    ranks = dist.get_world_size()
    for method in METHODS:
        own, expected = _sent_in_one_step(method, plan_for(senders, ranks))
        sent = of_all_ranks(own)
        if isinstance(expected, list):
            assert [Volume(*each["point_to_point"]) for each in sent] == [port.sent for port in expected]
            assert all(port.sent.bytes > 0 for port in expected)
            continue
        for name in ("point_to_point", "broadcast", "reduce"):
            total = Volume(sum(each[name][0] for each in sent), sum(each[name][1] for each in sent))
            assert total == getattr(expected, name), f"{method}, {name}"
        assert expected.point_to_point.bytes > 0


# Cost on the host ---------------------------------------------------------------------------------------------------


@checks.on(2)
def an_iteration_does_not_copy_the_layout_of_parameters() -> None:
    """Each layer would make several copies of 0.13 ms in an iteration, while the device waits."""
    for method in METHODS[1:]:
        training = Training(method, depth=1)
        training.applier.apply(BalancePlan(resize=(0.0, 0.3), migrate=(0.0, 0.3), receive=(0.3, 0.0)))
        training.steps(1)
        with patch.object(api, "copy", Mock(wraps=copy)) as copies:
            training.steps(1)
        assert copies.deepcopy.call_count == 0, method


# Each kind of layer --------------------------------------------------------------------------------------------------


def _layer_options(kind: str) -> list[dict[str, Any]]:
    return [{"skip_bias_add": True}, {"gather_output": True} if kind.endswith("Col") else {"parallel_input": False}]


def _train_layer(layer: torch.nn.Module, kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs and input gradients of the second step of SGD with momentum, and the parameters after it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    results = {}
    for step in range(2):
        whole, x, dy = inputs(kind, rank, world, seed=step)
        x = (whole if "parallel_input" in options else x).clone().requires_grad_()
        if kind.endswith("Col") and "gather_output" not in options:
            dy = dy[..., owned(kind, rank, world)].contiguous()
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        optimizer.zero_grad()
        y.backward(dy)
        optimizer.step()
        layer.begin_iteration() if hasattr(layer, "begin_iteration") else None
        results = {"y": y.detach(), "dx": x.grad}
    return results | {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


@checks.on(2)
@checks.on(3)
def options_of_each_kind_of_layer_are_those_of_colossalais() -> None:
    ranks = dist.get_world_size()
    transport = Transport(dist.new_group())
    for number, (kind, (our_class, their_class)) in enumerate(KINDS.items()):
        for options in _layer_options(kind):
            expected = _train_layer(build(their_class, kind, **options), kind, options)
            layer, plan = build(our_class, kind, **options), plan_for({number % ranks: 0.6}, ranks)
            exchange = list(COLUMN_EXCHANGES.values())[number % len(COLUMN_EXCHANGES)]
            layer.assign(None, ColumnMigration(exchange(transport), divide(layer.contraction_columns, plan).moves))
            assert relative_difference(_train_layer(layer, kind, options), expected) <= 1e-5, f"{kind} {options}"


test_on_ranks = checks.test()
