"""Migration is exact: training with it differs from training without it only by the order of summation. After a failure
during migration all ranks stop with a clear message or continue with a smaller plan. None hangs."""

import copy
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import pairwise, product
from random import Random
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from colossalai.tensor.d_tensor import api
from torch import Tensor
from torch.cuda import OutOfMemoryError

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import host_messages, resharding
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.balancer import Balancer
from colossal_hetero.balance.divide import BlockShape, Move, block_ports, column_traffic, divide
from colossal_hetero.balance.host_messages import Exchange
from colossal_hetero.balance.plan import BalancePlan, Traffic, Volume
from colossal_hetero.balance.pruning import SAMPLED_ROWS
from colossal_hetero.layers import hetero_layers, unit_exchange
from colossal_hetero.layers.block import Block
from colossal_hetero.layers.column_migration import BroadcastReduce, ScatterGather, moved_count
from colossal_hetero.layers.transport import Pending, Started, Transport
from colossal_hetero.layers.unit_exchange import Bucket, UnitExchange
from colossal_hetero.layers.unit_layout import UnitShare
from tests.support import migration_runs
from tests.support.checks import of_all_ranks, on
from tests.support.harness import errors_of_the_others
from tests.support.language_models import plan_of
from tests.support.migration_runs import METHODS, deciding_run, migrating_run, reference_run, relative_difference, slow
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import BATCH, Trained, batch, boost, loss_of, ours, sgd, tiny_vit, train

TOKENS = 5  # four patches and the class token


def plan_for(senders: dict[int, float], ranks: int) -> BalancePlan:
    """A plan in which the ``senders`` migrate these shares of their work, and all other ranks receive equal parts."""
    share = sum(senders.values()) / (ranks - len(senders))
    migrate = tuple(senders.get(rank, 0.0) for rank in range(ranks))
    return BalancePlan((0.0,) * ranks, migrate, tuple(0.0 if rank in senders else share for rank in range(ranks)))


def plans(ranks: int) -> Iterator[BalancePlan]:
    """Plans with each rank as the only sender; for more than two ranks also with several senders and uneven parts."""
    yield from (plan_of(rank, ranks, 0.6) for rank in range(ranks))
    if ranks > 2:
        yield plan_for({0: 0.5, ranks - 1: 0.8}, ranks)
        yield plan_for({rank: 0.3 + 0.1 * rank for rank in range(1, ranks)}, ranks)
        uneven = [0.1 * rank for rank in range(ranks)]
        yield BalancePlan((0.0,) * ranks, (sum(uneven), *(0.0,) * (ranks - 1)), tuple(uneven))


def run_with(method: str = "block", depth: int = 2, plan: BalancePlan | None = None, mode: str = "migrate") -> Trained:
    run = migrating_run(method, (), tiny_vit(depth=depth), choices=dict(mode=mode), tp_size=dist.get_world_size())
    if plan is not None:
        run.plugin.balancer.follow(plan)
    run.plugin.balancer.traffic.reset()
    return run


def blocks_of(run: Trained) -> list[Block]:
    return run.plugin.balancer._applier._blocks


@on(2, 4, 2)
@on(3, 3, 1)
def parameters_after_training_are_those_of_training_without_migration(steps: int, depth: int) -> None:
    ranks = dist.get_world_size()
    expected = train(reference_run(tiny_vit(depth=depth), tp_size=ranks), steps).parameters
    for (place, method), (number, plan) in product(enumerate(METHODS), enumerate(plans(ranks))):
        if ranks == 2 or place == number % 3 or IS_THOROUGH:  # on more ranks each plan is checked in one form
            run = train(run_with(method, depth, plan), steps)
            assert relative_difference(run.parameters, expected) <= 1e-5, f"{method}, {plan}"
            sent = run.plugin.balancer.traffic.sent["point_to_point"].messages
            assert sent > 0 or method == "broadcast-reduce", plan


@on(3)
def the_weights_of_a_block_are_sent_when_the_block_before_starts() -> None:
    """If each block has its own message. The blocks of the second half do not run in the first iteration."""

    def train_half_and_all(run: Trained) -> dict[str, Tensor]:
        if hasattr(run.plugin, "balancer"):
            run.plugin.balancer._applier.units.begin_pass()
        x = torch.randn(BATCH, TOKENS, 36, generator=torch.Generator().manual_seed(0))
        run.finish(run.model.unwrap().blocks[0](x).square().mean())
        return train(run, 2).parameters

    expected, events = train_half_and_all(reference_run(tiny_vit(), tp_size=3)), list[str]()
    with patch("colossal_hetero.layers.unit_exchange.MESSAGE_BYTES", 1):
        run = run_with(plan=plan_of(2, 3, 0.6))
    exchange = run.plugin.balancer.traffic.exchange
    for number, block in enumerate(run.model.unwrap().blocks):
        block.attn.register_forward_pre_hook(lambda *_, number=number: events.append(f"attention {number}"))
        block.mlp.register_forward_pre_hook(lambda *_, number=number: events.append(f"mlp {number}"))
    difference = relative_difference(train_half_and_all(run), expected)
    events.clear()
    with patch.object(
        run.plugin.balancer.traffic, "exchange", lambda *sent: (events.append("post"), exchange(*sent))[1]
    ):
        run.model(batch()[0])
    assert events == ["post", "attention 0", "post", "mlp 0", "post", "attention 1", "post", "mlp 1"]
    assert difference <= 1e-5


def _sums_before_messages(seed: int, run: Trained, only_last: bool = False) -> dict[int, list[int]]:
    """For a plan in which ranks have a part in different buckets: for each other rank, how many all-reduces this rank
    has launched before each message that it exchanges with that rank in an iteration of the model, or of its last
    block, in which messages are only counted."""
    rank, random = dist.get_rank(), Random(seed)
    transport, blocks = run.plugin.balancer.traffic, blocks_of(run)
    exchange, all_reduce = transport.exchange, dist.all_reduce
    sums, before = [0], dict[int, list[int]]()

    def log_and_exchange(sends: Any, receives: Any) -> Any:
        for other in {other for other, _ in (*sends, *receives)}:
            before.setdefault(other, []).append(sums[0])
        return Started(Pending(()), Pending(())) if only_last else exchange(sends, receives)

    def log_and_sum(*arguments: Any, **options: Any) -> Any:
        sums[0] += 1
        return all_reduce(*arguments, **options)

    pairs = [random.sample(range(dist.get_world_size()), 2) for _ in blocks]
    moves = [[Move(*pair, block.units - 1, block.units)] for block, pair in zip(blocks, pairs, strict=True)]
    kept = [block.units - (sender == rank) for block, (sender, _) in zip(blocks, pairs, strict=True)]
    units = UnitExchange(transport)
    with (
        patch("colossal_hetero.layers.unit_exchange.MESSAGE_BYTES", 1),
        patch.object(transport, "exchange", log_and_exchange),
        patch.object(dist, "all_reduce", log_and_sum),
    ):
        units.assign(blocks, moves, kept, [None] * len(kept))
        sums[0] = 0
        before.clear()
        units.begin_pass()
        if only_last:
            run.model.unwrap().blocks[-1].mlp(torch.randn(BATCH, TOKENS, 36)).sum().backward()
        else:
            images, labels = batch(0)
            loss_of(run.model(images), labels).backward()
        units.end_iteration()
        units.release(blocks)
    run.optimizer.zero_grad()
    return before


@on(3)
def all_ranks_launch_messages_and_sums_in_one_order() -> None:
    """NCCL demands it of operations of two communicators."""
    run, messages = run_with(), 0
    for seed in range(4):
        of_ranks = of_all_ranks(_sums_before_messages(seed, run))
        for rank, before in enumerate(of_ranks):
            for other, sums in before.items():
                messages += len(sums)
                assert of_ranks[other][rank] == sums, (seed, rank, other)
    assert messages > 20


@on(3)
def messages_of_blocks_that_do_not_run_are_received() -> None:
    """Or the next iteration would compute with their weights from before the step."""
    run = run_with()
    for seed in range(4):
        of_ranks = of_all_ranks(_sums_before_messages(seed, run, only_last=True))
        for rank, other in ((0, 1), (0, 2), (1, 2)):
            assert len(of_ranks[rank].get(other, ())) == len(of_ranks[other].get(rank, ())), (seed, rank, other)


@on(2)
def memory_that_nccl_sends_from_is_not_used_again_before_it_has_been_sent() -> None:
    """Waits of a rank that sends and receives, and of one that only sends, which does not wait for its receivers.
    NCCL has one handle for all messages of a batch; waiting again is allowed."""
    transport, other, waits = Transport(dist.new_group()), 1 - dist.get_rank(), []
    for receives in ([(other, torch.zeros(1))], []):
        handle = Mock()
        with patch.object(dist, "batch_isend_irecv", lambda operations, handle=handle: [handle]):
            started = transport.exchange([(other, torch.zeros(1)), (other, torch.zeros(1))], receives)
        for pending in (started.received, started.sent):
            pending.wait()
            waits.append(handle.wait.call_count)
    assert waits == [1, 2, 0, 1]


@on(3)
def all_pairs_of_ranks_are_connected_at_boost() -> None:
    with patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as sent:
        boost(ours(BalanceConfig(mode="auto"), tp_size=dist.get_world_size()), None, sgd)
    messages = [(each.op.__name__, each.peer) for call in sent.call_args_list for each in call.args[0]]
    others = [rank for rank in range(3) if rank != dist.get_rank()]
    assert messages == [(operation, other) for other in others for operation in ("isend", "irecv")]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_messages_take_few_processors_of_a_gpu() -> None:
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        config = host_messages._few_processors(backend).config
        assert (config.min_ctas, config.max_ctas) == (1, host_messages.MIGRATION_CTAS)
    assert host_messages._few_processors("gloo") is None


@on(2, {1: 0.6})
@on(3, {0: 0.5})
@on(4, {1: 0.4, 2: 0.7})
def messages_and_bytes_are_those_of_the_formula(senders: dict[int, float]) -> None:
    ranks = dist.get_world_size()
    plan = plan_for(senders, ranks)
    for method in METHODS:
        run = train(run_with(method, 1, plan), 1)
        counted = run.plugin.balancer.traffic.sent
        sent = of_all_ranks({name: Volume(each.messages, each.bytes) for name, each in counted.items()})
        if method == "block":
            blocks = blocks_of(run)
            moves = [divide(block.units, plan).moves for block in blocks]
            shapes = [BlockShape(block.elements_per_unit, len(block.layers)) for block in blocks]
            ports = block_ports(shapes, moves, [0] * len(shapes), ranks, 4)
            assert [each["point_to_point"] for each in sent] == [port.sent for port in ports]
            assert all(port.sent.bytes > 0 for port in ports)
            continue
        expected = Traffic()
        for layer in hetero_layers(run.model).values():
            outputs, columns = layer.matrix.shape
            sizes = divide(columns, plan).moves, outputs, BATCH * TOKENS, 1, ranks, 4
            expected += column_traffic(*sizes, column_parallel=layer.column_parallel, method=method)
        for name in ("point_to_point", "broadcast", "reduce"):
            total = sum((each[name] for each in sent), Volume())
            assert total == getattr(expected, name), f"{method}, {name}"
        assert expected.point_to_point.bytes > 0


@on(2)
def an_iteration_does_not_copy_the_layout_of_parameters() -> None:
    """Each layer would make several copies of 0.13 ms in an iteration, while the device waits."""
    for method in ("block", "scatter-gather"):
        run = train(run_with(method, 1, BalancePlan((0.0, 0.3), (0.0, 0.3), (0.3, 0.0)), mode="semi"), 1)
        with patch.object(api, "copy", Mock(wraps=copy)) as copies:
            train(run, 1)
        assert copies.deepcopy.call_count == 0, method


@on(2)
def units_of_the_largest_norms_are_kept() -> None:
    compared = 0
    for block in blocks_of(run_with(plan=BalancePlan.resizing((0.5, 0.0)), mode="semi")):
        x, weight = block.matrices
        if len(block.inputs) == 1 and block.places[0][0].parts == 1:
            # An MLP: choosing units in every iteration does not copy its weights.
            for matrix, layer in ((x, block.output), (weight, block.inputs[0])):
                assert matrix.data_ptr() == layer.weight.data_ptr(), block.name
        if max(len(x), len(weight)) <= SAMPLED_ROWS and dist.get_rank() == 0:  # with more rows norms are estimated
            by_hand = (x.norm(dim=0) * weight.norm(dim=0)).topk(block.units - round(0.5 * block.units)).indices
            compared += 1
            assert block._choose().tolist() == sorted(by_hand.tolist()), block.name
    assert compared == 2 or dist.get_rank() != 0


# Failures ------------------------------------------------------------------------------------------------------------


DECIDED = 4  # iterations after which training follows the plan that the balancer has decided on


def _other(plan: BalancePlan) -> BalancePlan:
    return plan.limited(plan.max_received / 2)


@on(3, 0)
@on(3, 2)
def ranks_with_different_plans_stop_before_they_apply_them(culprit: int) -> None:
    decide = Balancer._decide

    def decide_otherwise(balancer: Balancer, uncertainty: float) -> BalancePlan:
        plan = decide(balancer, uncertainty)
        return _other(plan) if dist.get_rank() == culprit else plan

    with patch.object(Balancer, "_decide", decide_otherwise):
        run = deciding_run(slow(1), METHODS[culprit])
        with pytest.raises(RuntimeError, match=r"have different balancing plans, .* training is stopped"):
            train(run, DECIDED)
    # The ranks stop before they carry out any part of the plan.
    assert sum(run.plugin.balancer.plan.migrate) == 0
    assert not any(sent.messages for sent in run.plugin.balancer.traffic.sent.values())


@on(2)
def ranks_whose_plans_become_different_stop_at_the_next_iteration() -> None:
    run = migrating_run("block", 1, tp_size=2)
    train(run, 1)
    if dist.get_rank() == 0:
        run.plugin.balancer.plan = _other(run.plugin.balancer.plan)
    with (
        patch.object(Exchange, "check_same", lambda *_: None),
        pytest.raises(RuntimeError, match="have different balancing plans"),
    ):
        train(run, 2)


PEAK = "can't allocate memory: an iteration would need more than the GPU has"


def refuse_buffers(most: float, error: RuntimeError) -> Any:
    """Rank 2 of three has memory only for received units up to the share ``most`` of its own."""
    reserve = Bucket.reserve

    def refuse(bucket: Bucket) -> None:
        if dist.get_rank() == 2 and any(moved_count(each.taken) > most * each.block.units for each in bucket.transfers):
            raise error
        reserve(bucket)

    return patch.object(Bucket, "reserve", refuse)


def refuse_peaks(most: float, error: RuntimeError) -> Any:
    """The same for the activations of these units, and for nothing for good."""

    def check(device: torch.device, more_bytes: int, more_work: float) -> None:
        assert more_bytes > 0
        if dist.get_rank() == 2 and more_work > most:
            raise error

    stack = ExitStack()
    stack.enter_context(patch.object(unit_exchange, "check_room", check))
    stack.enter_context(patch.object(resharding, "check_room", Mock(side_effect=error)))
    return stack


@on(3, refuse_buffers, 0.25, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
@on(3, refuse_buffers, 0.0, OutOfMemoryError("CUDA"))
@on(3, refuse_peaks, 0.25, RuntimeError(PEAK))
def a_plan_shrinks_until_every_receiver_has_enough_memory(refuse: Any, most: float, error: RuntimeError) -> None:
    apply, received = Applier.apply, list[float]()

    def note_and_apply(applier: Applier, plan: BalancePlan, for_good: bool = False) -> None:
        received.append(plan.max_received)
        apply(applier, plan, for_good)

    with refuse(most, error), patch.object(Applier, "apply", note_and_apply):
        run = deciding_run(slow(0), reshard_after=2 if refuse is refuse_peaks else 50)
        watch = migration_runs.Watch(run)
        train(run, DECIDED, each=watch)
    plan = watch.plans[-1]
    # What is received is halved until it fits, and all ranks release their memory before they try again.
    assert most / 2 <= plan.max_received <= most, plan
    assert all(after == 0 for before, after in pairwise(received) if after < before), received
    assert plan.note.startswith("receivers have memory for no more than ") and plan.note.count("memory") == 1, plan.note
    assert any(watch.messages) == (most > 0) or dist.get_rank() != 2, watch.messages
    assert not run.plugin.balancer.has_resharded
    migration_runs.assert_equal(run, train(reference_run(tp_size=3), DECIDED), f"{error}, {most}")


@on(2)
def memory_is_asked_for_only_on_top_of_what_has_run() -> None:
    """Rank 1 takes 0.2, 0.4 and 0.4 of the units of rank 0, in each iteration and then for good: it is asked whether it
    has memory for what comes on top of what has run."""
    asked: list[tuple[str, float]] = []

    def note(when: str, device: torch.device, more_bytes: int, more_work: float) -> None:
        assert more_bytes > 0
        asked.append((when, more_work))

    with (
        patch.object(unit_exchange, "check_room", partial(note, "migrating")),
        patch.object(resharding, "check_room", partial(note, "for good")),
    ):
        run = migrating_run("block", (), choices=dict(reshard_after=4), tp_size=2)
        for share in (0.2, 0.4, 0.4):
            run.plugin.balancer.follow(BalancePlan((0.0, 0.0), (share, 0.0), (0.0, share)))
            train(run, 1)
        train(run, 2)
    assert run.plugin.balancer.has_resharded
    if dist.get_rank() == 1:
        assert [when for when, _ in asked] == ["migrating", "migrating", "for good"]
        first, second, last = (work for _, work in asked)
        assert 0.1 < first < 0.3 and 0.1 < second < 0.3 and last == 0.0


@on(2)
def other_errors_are_not_treated_as_a_lack_of_memory() -> None:
    def fail(bucket: Bucket) -> None:
        raise RuntimeError("a mistake of our own")

    with patch.object(Bucket, "reserve", fail), pytest.raises(RuntimeError, match="a mistake of our own"):
        migrating_run("block", 1, tp_size=2)


def check_death(method: str, victim: int, owner: type, name: str) -> None:
    function, calls = getattr(owner, name), list[int]()

    def die(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        # The rank dies after the first iteration of the plan.
        if dist.get_rank() == victim and len(calls) > 12:
            os._exit(1)
        return function(*args, **kwargs)

    with patch.object(owner, name, die):
        run = migrating_run(method, 1, tp_size=dist.get_world_size())
        train(run, 100)
    raise AssertionError("training ended without an error although a rank died")


@pytest.mark.parametrize(
    ("world", "method", "victim", "owner", "name"),
    [
        (2, "block", 0, UnitShare, "gradients"),  # a receiver in its backward pass
        (2, "block", 1, UnitExchange, "begin_pass"),  # a sender in its forward pass
        (2, "scatter-gather", 0, ScatterGather, "reduce"),
        (3, "scatter-gather", 1, ScatterGather, "distribute"),
        (3, "broadcast-reduce", 1, BroadcastReduce, "distribute"),
        (2, "broadcast-reduce", 0, BroadcastReduce, "gather"),
    ],
)
def test_if_a_rank_dies_the_other_ranks_end_and_say_why(
    world: int, method: str, victim: int, owner: type, name: str
) -> None:
    errors = errors_of_the_others(world, check_death, method, victim, owner, name, victim=victim)
    assert all("RuntimeError" in error for error in errors)
    # A rank that does not wait for migrated work fails in the next collective of the model.
    words = "a rank of this tensor-parallel group stopped responding while migrated work"
    assert any(words in error for error in errors), errors
