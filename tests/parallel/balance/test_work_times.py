"""Waiting for other ranks does not count as a rank's own work, and neither balancing nor measuring costs the host much:
events of a GPU's clock are few, and no operation waits for a GPU. Costs that are measured before training are the same
on all ranks and leave no trace."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.gpu.training.host_waits import host_waits
from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance import BalancePlan, Costs, pretest
from colossal_hetero.balance.clock import CudaClock, IterationTimes
from colossal_hetero.balance.plan import Traffic, Volume
from colossal_hetero.balance.pretest import fit_link, fit_products, seconds_of
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.language_head import VocabularyRows
from colossal_hetero.plugin.hybrid import layer_balancing
from tests.support.checks import of_all_ranks, on, with_colossalai_passes
from tests.support.fake_device import FakeDevice
from tests.support.language_models import gpt2, llama, plan_of, train_on_tokens
from tests.support.training import Trained, batch, boost, loss_of, ours, scripted, sgd, tiny_vit, train

LATE = 0.4  # seconds by which one rank starts each iteration late. An iteration takes a twentieth of that.

NEVER = BalanceConfig(mode="migrate", warmup_iterations=10**6, measure_costs=False)


@on(2, "block", 0, 0)
@on(2, "block", 1, 0)
@on(2, "broadcast-reduce", 0, 1)
def waiting_for_migrated_work_is_no_work(migration: str, giver: int, late: int) -> None:
    """The late rank sleeps before its forward pass; the others wait for what it sends, or for its collectives."""
    run = boost(ours(BalanceConfig(**{**vars(NEVER), "migration": migration}), tp_size=dist.get_world_size()))
    train(run, 1)
    run.plugin.balancer.follow(plan_of(giver, 2))
    if dist.get_rank() == late:
        run.model.unwrap().register_forward_pre_hook(lambda *_: time.sleep(LATE), prepend=True)
    train(run, 2)
    records = run.plugin.balancer.collect()
    if records is not None:
        for record in records[-2:]:
            for rank, seconds in enumerate(record.ranks):
                assert seconds.work_seconds < LATE / 2, f"rank {rank} worked {seconds.work_seconds} s: {record}"
            waited = max(seconds.communication_seconds for seconds in record.ranks)
            assert waited > LATE / 2, f"nobody waited: {record}"


@on(2)
def a_giver_does_not_wait_for_a_late_receiver_before_its_own_products() -> None:
    late, giver = 0, 1
    run = boost(ours(NEVER, tp_size=2))
    train(run, 2)
    run.plugin.balancer.follow(plan_of(giver, 2))
    train(run, 1)
    seconds: list[float] = []
    model = run.model.unwrap()
    first = next(iter(hetero_layers(model).values()))

    def begin(*_: Any) -> None:
        seconds.append(-time.perf_counter())
        if dist.get_rank() == late:
            time.sleep(LATE)

    def end_first(product: Callable[[], Any]) -> Any:
        result = product()
        if len(seconds) % 2:
            seconds.append(time.perf_counter())
        return result

    model.register_forward_pre_hook(begin, prepend=True)
    first.slow_down = end_first  # units of blocks with hooks do not migrate
    for _ in range(2):
        dist.barrier()
        train(run, 1)
    if dist.get_rank() == giver:
        elapsed = [start + end for start, end in zip(seconds[::2], seconds[1::2], strict=True)]
        assert max(elapsed) < LATE / 2, f"the first product ended after {elapsed} s"


@on(4)
def the_cost_of_migration_is_learned_without_the_bubble_of_a_pipeline() -> None:
    run = boost(ours(NEVER, tp_size=2, pp_size=2, num_microbatches=2))
    train(run, 2)
    is_first = run.plugin.stage_manager.is_first_stage()
    run.plugin.balancer.follow(BalancePlan.idle(2) if is_first else plan_of(1, 2))
    layers = list(hetero_layers(run.model).values())
    clock = layers[0].clock
    measured: list[Any] = []

    def read() -> list[Any]:
        times = type(clock).read(clock)
        measured.extend(times)
        return times

    with patch.object(clock, "read", read):
        if is_first:
            layers[0].register_forward_pre_hook(lambda *_: time.sleep(LATE / 2))
        train(run, 2)
    assert len(measured) == 2
    waits = torch.tensor([times.migration_seconds for times in measured])
    dist.all_reduce(waits, op=dist.ReduceOp.MIN, group=run.plugin.tp_group)
    assert waits.max() < LATE / 4, f"costs of migration would be learned from {waits.tolist()} s"
    if not is_first:
        assert max(times.communication_seconds + times.other_seconds for times in measured) > LATE / 2


def sleep_late(*_: Any) -> None:
    if dist.get_rank() == 1:
        time.sleep(LATE)


def before_the_last_gradient(run: Trained) -> Any:
    return next(run.model.unwrap().parameters()).register_hook(sleep_late)


IN_GROUP, OF_REPLICAS = dict(tp_size=2, max_norm=1.0), dict(tp_size=1)
PLACES: dict[str, tuple[Callable[[Trained], Any], dict[str, Any]]] = {
    "embedding": (lambda run: run.model.unwrap().transformer.wte.register_forward_pre_hook(sleep_late), IN_GROUP),
    "loss": (lambda run: run.model.unwrap().lm_head.register_forward_hook(sleep_late), IN_GROUP),
    "gradient norm": (before_the_last_gradient, IN_GROUP),
    "gradients": (before_the_last_gradient, OF_REPLICAS),
}


@on(2, "embedding")
@on(2, "loss")
@on(2, "gradient norm")
@on(2, "gradients")
def waiting_in_collectives_is_no_work(place: str) -> None:
    """Rank 1 is late at the place in an iteration; rank 0 waits for it in the collective that follows."""
    be_late, options = PLACES[place]
    run = boost(ours(BalanceConfig(mode="off"), make_vocab_size_divisible_by=4, **options), gpt2(), sgd)
    clock, finished = run.plugin.balancer._clock, list[Any]()
    clock.read = lambda: (finished.extend(times := type(clock).read(clock)), times)[1]
    train_on_tokens(run, 2)
    run.plugin.balancer.collect()
    be_late(run)
    train_on_tokens(run, 1)
    for seconds in (record.ranks[0] for record in run.plugin.balancer.collect() or ()):
        assert seconds.work_seconds < LATE / 2 < seconds.communication_seconds, f"{place}: {seconds}"
        assert sum(work.fixed for work in finished[-1].kinds.values()) < LATE / 2, f"{place}: {finished[-1]}"


BY_PRIORITY = dict(priority="priority", priority_interval=2)
BY_DIFF = dict(priority="priority-diff", priority_interval=2)

CONFIGS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "resize columns at random": {"mode": "resize", "pruning": Pruning(resizing="column", priority="random")},
    "resize columns by priority": {
        "mode": "resize",
        "pruning": Pruning(resizing="column", imputation="same", **BY_PRIORITY),  # type: ignore[arg-type]
    },
    "resize blocks": {"mode": "resize", "pruning": Pruning(**BY_DIFF)},  # type: ignore[arg-type]
    "migrate columns": {"mode": "migrate", "migration": "broadcast-reduce"},
    "semi": {"mode": "semi", "pruning": Pruning(**BY_PRIORITY)},  # type: ignore[arg-type]
    "auto": {"mode": "auto", "max_resize": 0.3, "pruning": Pruning(**BY_DIFF)},  # type: ignore[arg-type]
}


@on(2)
def a_training_iteration_does_not_wait_for_the_device_in_any_mode() -> None:
    for name, choices in CONFIGS.items():
        config = BalanceConfig(warmup_iterations=0, patience=1, measure_costs=False, **choices)
        with scripted(lambda rank, iteration: 4.0 if rank == 1 and iteration < 4 else 1.0):
            run = boost(ours(config, tp_size=2), tiny_vit(depth=1), sgd)
        plans = [run.plugin.balancer.plan]
        with host_waits(torch.device("cpu")) as waits:
            for number in range(8):
                images, labels = batch(number)
                run.finish(loss_of(run.model(images), labels))
                if run.plugin.balancer.plan != plans[-1]:
                    plans.append(run.plugin.balancer.plan)
        assert not {wait.place for wait in waits}, name
        assert name == "off" or len(plans) > 2, name


def test_rows_of_a_vocabulary_are_found_without_waiting() -> None:
    numbers = torch.tensor([4, 5, 6, 7, 1])  # 6 and 7 are padding
    with host_waits(torch.device("cpu")) as waits:
        columns = VocabularyRows(numbers, vocabulary=6).columns_of(torch.tensor([5, 0, 1, 4, -100]))
    assert columns.tolist() == [1, -1, 4, 0, -1]
    assert not waits


def test_waits_are_recorded_with_their_place() -> None:
    values = torch.arange(4.0)
    with host_waits(torch.device("cpu")) as waits:
        values[values > 1]
        values[torch.tensor([0, 1])]
        if values.sum():
            values[values > 1] = torch.zeros(1)  # filled with a number, torch 2.15 does not wait
    assert [wait.place.partition(":")[0] for wait in waits] == ["balance/test_work_times.py"] * 3
    assert all(wait.is_in("tests/parallel/balance/test_work_times.py") for wait in waits)


COLLECTIVES = 7
"""Of a layer: two in the forward pass, one for each of the five column-parallel layers in the backward pass."""

MICRO_BATCHES = 2
ACTIVATION = 0.5
"""Milliseconds of an activation function or a norm in the backward pass; half of it in the forward pass."""


@contextmanager
def llama_on_a_device(mode: Any, layers: int) -> Iterator[tuple[FakeDevice, Trained]]:
    """A run on a device of the test, where each layer's products take a time of their own, and collectives 64 ms."""
    device, reduce = FakeDevice(), dist.all_reduce

    def all_reduce(*arguments: Any, **options: Any) -> Any:
        device.milliseconds += 64.0
        return reduce(*arguments, **options)

    with (
        patch.multiple(torch.cuda, **device.fakes),
        patch.object(layer_balancing, "make_clock", lambda *_: CudaClock()),
        patch.object(dist, "all_reduce", all_reduce),
    ):
        plugin = ours(BalanceConfig(mode=mode, measure_costs=False), tp_size=2, make_vocab_size_divisible_by=4)
        run = boost(plugin, llama(num_hidden_layers=layers), sgd)
        for number, layer in enumerate(hetero_layers(run.model).values()):

            def slow_down(product: Callable[[], Any], milliseconds: float = 1.0 + number % 7) -> Any:
                device.milliseconds += milliseconds
                return product()

            layer.slow_down = slow_down
        yield device, run


def events_of(layers: int) -> tuple[list[int], list[IterationTimes]]:
    with llama_on_a_device("auto", layers) as (device, run):

        def advance(milliseconds: float) -> Callable[..., None]:
            return lambda *_: setattr(device, "milliseconds", device.milliseconds + milliseconds)

        for module in run.model.modules():
            if isinstance(module, nn.SiLU) or type(module).__name__ == "LlamaRMSNorm":
                module.register_forward_hook(advance(ACTIVATION / 2))
                module.register_full_backward_hook(advance(ACTIVATION))
        clock, events, times = run.plugin.balancer._clock, list[int](), list[IterationTimes]()
        read, first = clock.read, next(iter(hetero_layers(run.model).values()))
        clock.read = lambda: times.extend(found := read()) or found
        for _ in range(18):
            before = device.recorded
            train_on_tokens(run, 1, MICRO_BATCHES)
            device.catch_up()
            events.append(device.recorded - before)
            assert (events[-1] == 0) == (first.clock is None)
    return events, times


@with_colossalai_passes(2)  # which divide the head
def a_layer_costs_events_at_its_collectives_and_where_a_blocks_products_begin() -> None:
    (one, _), (three, (times, *_)) = events_of(1), events_of(3)
    per_layer = [(more - few) / 2 / MICRO_BATCHES for few, more in zip(one, three, strict=True)]
    measured = [number for number, count in enumerate(three) if count]
    # While nothing changes, few iterations are measured; in the others nothing is recorded, and layers mark no clock.
    assert [number for number in measured if number > 8] == [16]
    for number in measured:
        # The ends of a collective, and two events in each of the four passes of a block, but for its end.
        assert per_layer[number] == 2 * COLLECTIVES + 6, number
    # Three products of each layer, and the activation function. Its backward pass counts twice, because it lies in
    # front of the second product beside a collective, for which the product before is taken.
    passes = 3 * MICRO_BATCHES * 1e-3
    attention, mlp, head = passes * 3 * (1 + 2 + 3 + 4), passes * (3 * (5 + 6 + 7) + 2.5 * ACTIVATION), passes
    assert [each.movable for each in times.kinds.values()] == pytest.approx([attention, mlp, head])
    norms = (1 + 3 * 2) * MICRO_BATCHES * 1.5 * ACTIVATION * 1e-3
    assert times.other_seconds == pytest.approx(norms)


# Costs ---------------------------------------------------------------------------------------------------------------


SHAPES = [(96, 64), (64, 96), (96, 64)]


def traffic(share: float) -> Traffic:
    sent = round(share * 1e6)
    return Traffic(Volume(4, sent), Volume(2, sent), Volume(2, sent))


def prepare(group: dist.ProcessGroup, form: Any = "block", **options: Any) -> tuple[Costs, int]:
    measurement = pretest.CostMeasurement(group, SHAPES, 40, torch.float32, torch.device("cpu"), traffic, form)
    with (
        patch.multiple(pretest, PRODUCT_SECONDS=0.01, MESSAGES={2**12: 3, 2**14: 3}),
        patch.object(pretest, "measure_costs", wraps=pretest.measure_costs) as measure,
    ):
        costs = pretest.prepare_costs(BalanceConfig(mode="auto", **options), measurement)
    return costs, measure.call_count


@on(2)
@on(3)
def all_ranks_have_the_same_costs_and_without_measuring_their_defaults() -> None:
    before = torch.get_rng_state()
    for form in ("column", "block"):
        found = of_all_ranks(prepare(dist.group.WORLD, form))
        costs, measured = found[0]
        assert found == [(costs, 1)] * len(found) and measured == 1
        assert costs.phi1(0.5) > 0 and costs.receive_factor > 0 and costs.communication_scale == 1.0
    assert torch.equal(torch.get_rng_state(), before), "measuring changed the state of the random numbers"
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert prepare(alone) == prepare(dist.group.WORLD, measure_costs=False) == (Costs(), 0)


SIZES = (2**12, 2**16, 2**20)


@given(st.floats(0, 1e-2), st.floats(1e-11, 1e-6))
def test_the_fit_recovers_the_latency_and_bandwidth_of_a_link(latency: float, per_byte: float) -> None:
    fitted = fit_link(SIZES, [latency + size * per_byte for size in SIZES])
    assert fitted == (pytest.approx(latency, abs=1e-9), pytest.approx(per_byte))


def test_fitted_links_equal_values_computed_by_hand() -> None:
    assert fit_link([1000], [0.5]) == (0.0, 0.0005)  # the network was too slow to measure a second size
    assert fit_link([1000, 2000], [0.5, 0.4]) == (0.5, 0.0)
    assert seconds_of(Volume(2, 3), 0.25, 0.5) == 2.0


def test_the_fits_recover_the_costs_of_products() -> None:
    taken = [1.2 * share for share in pretest.RECEIVED_SHARES]
    resized = [1 - share + 0.02 + 0.1 * share for share in pretest.RESIZED_SHARES]
    assert fit_products(resized, taken) == pytest.approx((0.02, 0.1, 1.2))
    free = [0.7 * (1 - share) for share in pretest.RESIZED_SHARES]
    assert fit_products(free, taken) == (0.0, 0.0, pytest.approx(1.2))  # costs are never negative
