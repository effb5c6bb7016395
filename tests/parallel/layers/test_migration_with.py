"""Migration through the plugin is exact together with other features that a training run uses.

An injected straggler appears in the first iteration. The balancer detects it, and its plan applies from the third
iteration on. The reference is Colossal-AI's own plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import apply
from colossal_hetero.balance.decide.plan import BalancePlan
from colossal_hetero.layers import hetero_layers
from tests.parallel.layers.test_checkpoints import load, save
from tests.support.harness import run_ranks
from tests.support.training import (
    SlowdownScript,
    Trained,
    assert_same_parameters,
    batch,
    boost,
    loss_of,
    ours,
    scripted,
    sgd,
    theirs,
    tiny_vit,
    train,
)

METHODS = ("block", "broadcast-reduce", "scatter-gather")
ITERATIONS = 4
IN_FORCE = 2
"""The first iteration that runs by the plan."""

PIPELINE = dict(tp_size=2, pp_size=2, num_microbatches=3)


def migrate(method: str, **choices: Any) -> BalanceConfig:
    choices = dict(mode="migrate", warmup_iterations=0, patience=1, measure_costs=False) | choices
    return BalanceConfig(migration=method, **choices)  # type: ignore[arg-type]


def slow(*ranks: int) -> SlowdownScript:
    """These global ranks take four times as long for their products: on two ranks, 0.6 of the work moves."""
    return lambda rank, iteration: 4.0 if rank in ranks else 1.0


@dataclass
class Watch:
    """Records what one rank's balancer did in each iteration; pass it to ``train`` as ``each``."""

    run: Trained
    plans: list[BalancePlan] = field(default_factory=list)
    """That hold after each iteration."""
    messages: list[int] = field(default_factory=list)
    """That this rank sent in each."""

    def __call__(self, iteration: int) -> None:
        balancer = self.run.plugin.balancer
        self.plans.append(balancer.plan)
        self.messages.append(sum(sent.messages for sent in balancer.traffic.sent.values()))
        balancer.traffic.reset()

    def assert_migrated(self, sender: int, what: str) -> None:
        """Rank ``sender`` of the group gave, the others took, and this rank had its part in it from IN_FORCE on."""
        plan = self.plans[-1]
        ranks = len(plan.migrate)
        assert plan.migrate[sender] > 0.1, f"{what}: {plan}"
        assert all(plan.receive[rank] > 0 for rank in range(ranks) if rank != sender), f"{what}: {plan}"
        assert all(before == plan for before in self.plans[IN_FORCE:]), f"{what}: {self.plans}"
        assert not any(self.messages[:IN_FORCE]), f"{what}: {self.messages}"
        assert all(count > 0 for count in self.messages[IN_FORCE:]), f"{what}: {self.messages}"


def apart(actual: dict[str, Tensor], expected: dict[str, Tensor], size_of: dict[str, Tensor] | None = None) -> float:
    """The largest difference of a tensor, relative to that of ``size_of``, by default of what was expected."""
    assert list(actual) == list(expected)
    sizes = expected if size_of is None else size_of
    return max(
        float((actual[name].float() - expected[name].float()).norm() / sizes[name].float().norm().clamp(min=1e-6))
        for name in expected
    )


def assert_equal(actual: Trained, expected: Trained, what: str) -> None:
    """Losses and parameters are the same up to the order of summation in fp32."""
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5), what
    assert all(math.isfinite(loss) for loss in expected.losses), what
    difference = apart(actual.parameters, expected.parameters)
    assert difference <= 1e-5, f"{what}: parameters differ by {difference}"


def blocks_of(run: Trained) -> list[str]:
    """The layers that belong to a block."""
    return [name for name, layer in hetero_layers(run.model).items() if layer.block is not None]


@contextmanager
def seeded() -> Iterator[None]:
    """The same random numbers for every run: models that drop draw from states that count how many there were."""
    Randomizer._INDEX = 0
    torch.manual_seed(11)
    yield


# What the plugin offers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Options and model of a training run in which a straggler in one group is relieved."""

    options: dict[str, Any]
    """The plugin's."""
    model: Callable[[], nn.Module] = tiny_vit
    accumulation: int = 1
    sender: int = 1
    """Global rank of the straggler."""
    in_blocks: int | None = None
    """How many layers are in a block, where not all are."""


def _checkpointed(reentrant: bool = False) -> nn.Module:
    model = tiny_vit()
    set_reentrant_ckpt(reentrant)
    model.set_grad_checkpointing()
    return model


def _frozen(trained: str) -> Callable[[], nn.Module]:
    """A model of which only parameters with ``trained`` in their name are trained."""

    def make() -> nn.Module:
        model = tiny_vit()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    return make


CASES: dict[int, dict[str, Case]] = {
    2: {
        "accumulated": Case(dict(tp_size=2), accumulation=3, sender=0),
        "clipped": Case(dict(tp_size=2, max_norm=0.05)),
        "checkpointed": Case(dict(tp_size=2), _checkpointed, accumulation=2),
        "checkpointed, reentrant": Case(dict(tp_size=2), lambda: _checkpointed(reentrant=True), sender=0),
        "dropout outside of blocks": Case(dict(tp_size=2), lambda: tiny_vit(pos_drop_rate=0.2, drop_path_rate=0.3)),
        "dropout in attention": Case(dict(tp_size=2), lambda: tiny_vit(attn_drop_rate=0.2), in_blocks=4),
        "dropout in MLPs": Case(dict(tp_size=2), lambda: tiny_vit(proj_drop_rate=0.2), sender=0, in_blocks=4),
        "biases only": Case(dict(tp_size=2), _frozen("bias")),
        "second block only": Case(dict(tp_size=2), _frozen("blocks.1"), sender=0),
        "attention's weights only": Case(dict(tp_size=2), _frozen("qkv.weight")),
    },
    4: {
        "dp=2": Case(dict(tp_size=2), accumulation=2, sender=3),
        "dp=2, dp inside": Case(dict(tp_size=2, dp_outside=False), sender=1),
        "pp=2, first stage": Case(PIPELINE, accumulation=2, sender=1),
        "pp=2, last stage": Case(PIPELINE, sender=2),
        "pp=2, checkpointed": Case(PIPELINE, _checkpointed, sender=3),
        "pp=2, interleaved": Case(
            dict(tp_size=2, pp_size=2, num_microbatches=2, pp_style="interleaved", num_model_chunks=2),
            lambda: tiny_vit(depth=4),
            sender=3,
        ),
    },
}


def run_case(case: Case, method: str | None, what: str = "") -> Trained:
    """Train by Colossal-AI's plugin or, with a ``method``, by ours with the straggler."""
    with seeded():
        if method is None:
            run = train(boost(theirs(**case.options), case.model(), sgd), ITERATIONS, case.accumulation)
            run.model._force_wait_all_gather()
            return run
        with scripted(slow(case.sender)):
            run = boost(ours(migrate(method), **case.options), case.model(), sgd)
        watch = Watch(run)
        train(run, ITERATIONS, case.accumulation, each=watch)
        run.model._force_wait_all_gather()
    if method == "block" and case.in_blocks is not None:
        assert 0 < len(blocks_of(run)) == case.in_blocks < len(hetero_layers(run.model)), what
    elif method == "block":
        assert len(blocks_of(run)) == len(hetero_layers(run.model)), what
    group = dist.get_process_group_ranks(run.plugin.tp_group)
    if case.sender in group:
        watch.assert_migrated(group.index(case.sender), what)
    else:
        assert sum(watch.plans[-1].migrate) == 0 and not any(watch.messages), what
    return run


def check_cases() -> None:
    for name, case in CASES[dist.get_world_size()].items():
        expected = run_case(case, None)
        for method in METHODS:
            assert_equal(run_case(case, method, f"{name}, {method}"), expected, f"{name}, {method}")


@pytest.mark.parametrize("world", CASES)
def test_what_the_plugin_offers_stays_exact(world: int) -> None:
    run_ranks(world, check_cases)


# What is sent in an iteration of several micro-batches ---------------------------------------------------------------


def check_messages() -> None:
    micro_batches, layers = 3, 8
    for no_sync in (True, False):
        expected = train(boost(theirs(tp_size=2), None, sgd), ITERATIONS, micro_batches, no_sync=no_sync)
        for sender, method in ((0, "block"), (1, "block"), (1, "broadcast-reduce"), (0, "scatter-gather")):
            with scripted(slow(sender)):
                run = boost(ours(migrate(method), tp_size=2), None, sgd)
            watch = Watch(run)
            train(run, ITERATIONS, micro_batches, each=watch, no_sync=no_sync)
            what = f"{method}, sender {sender}, no_sync={no_sync}"
            watch.assert_migrated(sender, what)
            assert_equal(run, expected, what)
            if method == "block":
                # All blocks' weights are sent in one message; each layer's gradients return in a separate message.
                returns = layers * (1 if no_sync else micro_batches)
                sent = 1 if dist.get_rank() == sender else returns
                assert watch.messages[IN_FORCE:] == [sent] * (ITERATIONS - IN_FORCE), f"{what}: {watch.messages}"


def test_blocks_are_sent_once_per_step_and_gradients_return_once_if_they_are_summed_once() -> None:
    run_ranks(2, check_messages)


def check_last_backward_under_no_sync() -> None:
    with scripted(slow(1)):
        run = boost(ours(migrate("block"), tp_size=2), None, sgd)
    train(run, IN_FORCE)
    before = run.parameters
    images, labels = batch()
    with run.booster.no_sync(run.model, run.optimizer):
        run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
    with pytest.raises(RuntimeError, match=r"have not returned to their owner: .* outside no_sync\(\)"):
        run.optimizer.step()
    for name, parameter in run.parameters.items():
        assert torch.equal(parameter, before[name]), f"{name} was changed by a step without all gradients"
    # Training can continue correctly; gradients that had not returned are discarded.
    run.optimizer.zero_grad()
    train(run, 2)
    expected = train(train(boost(theirs(tp_size=2), None, sgd), IN_FORCE), 2)
    assert_equal(run, expected, "after the mistake")


def test_a_step_without_all_gradients_is_refused() -> None:
    run_ranks(2, check_last_backward_under_no_sync)


def check_abandoned() -> None:
    """An iteration is abandoned half way, as after a loss that is not a number, and started again."""
    runs = []
    for method in (None, *METHODS):
        with scripted(slow(1)):
            run = boost(theirs(tp_size=2) if method is None else ours(migrate(method), tp_size=2), None, sgd)
        train(run, IN_FORCE)
        images, labels = batch(40)
        with run.booster.no_sync(run.model, run.optimizer):
            run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
        run.optimizer.zero_grad()
        runs.append(train(run, 2, accumulation=2))
        if method is not None:
            assert run.plugin.balancer.plan.migrate[1] > 0, method
            assert_equal(run, runs[0], method)


def test_discarded_gradients_leave_no_trace() -> None:
    run_ranks(2, check_abandoned)


# Half precision ------------------------------------------------------------------------------------------------------


HALF: dict[int, dict[str, Case]] = {
    2: {
        "bf16": Case(dict(tp_size=2, precision="bf16"), accumulation=2),
        "bf16, clipped": Case(dict(tp_size=2, precision="bf16", max_norm=0.5), sender=0),
        "fp16": Case(dict(tp_size=2, precision="fp16", initial_scale=2**8)),
        "bf16, checkpointed": Case(dict(tp_size=2, precision="bf16"), _checkpointed),
    },
    4: {
        "ZeRO 1": Case(dict(tp_size=2, precision="bf16", zero_stage=1), accumulation=2, sender=2),
        "ZeRO 2": Case(dict(tp_size=2, precision="bf16", zero_stage=2), sender=1),
        "ZeRO 1, gathered late": Case(
            dict(tp_size=2, precision="bf16", zero_stage=1, overlap_allgather=True), accumulation=2
        ),
        "ZeRO 1, fp16": Case(dict(tp_size=2, precision="fp16", initial_scale=2**8, zero_stage=1), sender=3),
        "pipeline": Case(PIPELINE | dict(precision="bf16"), sender=3),
    },
}


def check_half() -> None:
    for name, case in HALF[dist.get_world_size()].items():
        of_half = ("zero_stage", "overlap_allgather", "initial_scale")
        whole = {key: value for key, value in case.options.items() if key not in of_half}
        exact = run_case(Case(whole | dict(precision="fp32"), case.model, case.accumulation), None).parameters
        plain = run_case(case, None).parameters
        start = boost(theirs(**whole), case.model()).parameters
        moved = {name: exact[name] - start[name] for name in exact}

        def error(parameters: dict[str, Tensor], exact: Any = exact, moved: Any = moved) -> float:
            """The error of half precision, relative to the change of the parameters by training."""
            off = sum(float((parameters[name].float() - exact[name]).square().sum()) for name in exact)
            return math.sqrt(off / sum(float(change.square().sum()) for change in moved.values()))

        for method in METHODS[:2]:
            migrated = run_case(case, method, f"{name}, {method}").parameters
            # Another order of summation rounds differently, but not worse.
            assert error(migrated) <= 1.1 * error(plain) < 0.1, f"{name}, {method}"


@pytest.mark.parametrize("world", HALF)
def test_half_precision_is_no_further_from_fp32_than_without_migration(world: int) -> None:
    run_ranks(world, check_half)


# What a training loop may do -----------------------------------------------------------------------------------------


def loop_freely(run: Trained, iterations: int) -> Trained:
    """Batches of changing size, two forwards per backward, unused forward passes, evaluation in between."""
    model = run.model
    for iteration in range(iterations):
        images, labels = batch(iteration, size=3 + iteration)
        with torch.no_grad():
            run.losses.append(loss_of(model(images), labels).item())  # in train mode
        more, more_labels = batch(50 + iteration, size=8 - iteration)
        loss = loss_of(model(images), labels) + loss_of(model(more), more_labels)
        run.losses.append(loss.item())
        run.booster.backward(loss, run.optimizer)
        model.eval()
        with torch.no_grad():
            run.losses.append(loss_of(model(more), more_labels).item())
        loss_of(model(images), labels)
        model.train()
        run.losses.append(loss_of(model(more), more_labels).item())  # thrown away
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def check_free_loops() -> None:
    for sender in (0, 1):
        expected = loop_freely(boost(theirs(tp_size=2), None, sgd), ITERATIONS)
        for method in METHODS:
            with scripted(slow(sender)):
                run = boost(ours(migrate(method), tp_size=2), None, sgd)
            loop_freely(run, ITERATIONS)
            assert run.plugin.balancer.plan.migrate[sender] > 0.1, method
            assert_equal(run, expected, f"{method}, sender {sender}")


def test_whatever_the_training_loop_does_in_between() -> None:
    run_ranks(2, check_free_loops)


def check_calls_beside_the_boosted_model() -> None:
    """The model that was given to ``boost`` is the one inside the boosted one, and may be called or switched itself."""

    def loop(run: Trained) -> Trained:
        inner = run.model.unwrap()
        for iteration in range(ITERATIONS):
            images, labels = batch(iteration)
            run.model.eval()
            inner.train()
            loss = loss_of((inner if iteration % 2 else run.model)(images), labels)
            run.losses.append(loss.item())
            run.booster.backward(loss, run.optimizer)
            run.optimizer.step()
            run.optimizer.zero_grad()
        return run

    expected = loop(boost(theirs(tp_size=2), None, sgd))
    for method in METHODS:
        with scripted(slow(1)):
            run = boost(ours(migrate(method), tp_size=2), None, sgd)
        loop(run)
        assert run.plugin.balancer.plan.migrate[1] > 0.1, method
        assert_equal(run, expected, method)


def test_the_model_inside_the_boosted_one_can_be_called() -> None:
    run_ranks(2, check_calls_beside_the_boosted_model)


def check_evaluation(world: int) -> None:
    """Logits of evaluation are those of the same weights without balancing, at every step."""

    def evaluate(run: Trained, logits: list[Tensor]) -> Callable[[int], None]:
        def each(iteration: int) -> None:
            run.model.eval()
            with torch.no_grad():
                logits.append(run.model(batch(99)[0]))
            run.model.train()

        return each

    expected: list[Tensor] = []
    plain = boost(theirs(tp_size=world), None, sgd)
    train(plain, ITERATIONS, each=evaluate(plain, expected))
    for method in METHODS:
        with scripted(slow(world - 1)):
            run = boost(ours(migrate(method), tp_size=world), None, sgd)
        logits: list[Tensor] = []
        train(run, ITERATIONS, each=evaluate(run, logits))
        assert sum(run.plugin.balancer.plan.migrate) > 0.1, method
        for iteration, (actual, wanted) in enumerate(zip(logits, expected, strict=True)):
            torch.testing.assert_close(
                actual,
                wanted,
                rtol=1e-5,
                atol=1e-5 * float(wanted.abs().max()),
                msg=lambda text, method=method, iteration=iteration: f"{method}, iteration {iteration}: {text}",
            )


@pytest.mark.parametrize("world", [2, 3])
def test_evaluation_is_that_of_the_unbalanced_model(world: int) -> None:
    run_ranks(world, check_evaluation, world)


# A plan that changes -------------------------------------------------------------------------------------------------

PHASE = 5


def slow_in_turn(rank: int, iteration: int) -> float:
    """No rank is slow in the first phase, then rank 0, then none, then rank 1, and so on."""
    phase = iteration // PHASE
    return 4.0 if phase % 2 == 1 and phase // 2 == rank else 1.0


def slow_one_after_the_other(rank: int, iteration: int) -> float:
    """Rank 0 first, then rank 1, …, without a pause."""
    return 4.0 if iteration // PHASE == rank else 1.0


def check_changing_plans(slowdown: SlowdownScript, phases: int) -> None:
    expected = train(boost(theirs(tp_size=dist.get_world_size()), None, sgd), PHASE * phases)
    for method in METHODS:
        with scripted(slowdown):
            run = boost(ours(migrate(method), tp_size=dist.get_world_size()), None, sgd)
        watch = Watch(run)
        train(run, PHASE * phases, each=watch)
        senders = [tuple(rank for rank, share in enumerate(plan.migrate) if share > 0) for plan in watch.plans]
        turns = [pair[1] for pair in zip([(), *senders], senders, strict=False) if pair[0] != pair[1] and pair[1]]
        assert turns == [(rank,) for rank in range(dist.get_world_size())], f"{method}: {senders}"
        assert_equal(run, expected, method)


@pytest.mark.parametrize("world", [2, 3])
def test_stragglers_that_come_and_go(world: int) -> None:
    run_ranks(world, check_changing_plans, slow_in_turn, 2 * world + 1)


@pytest.mark.parametrize("world", [2, 3])
def test_a_straggler_that_moves_from_rank_to_rank(world: int) -> None:
    run_ranks(world, check_changing_plans, slow_one_after_the_other, world)


# Pruning and migrating at once ---------------------------------------------------------------------------------------


class First:
    """A rule that keeps the first columns or units, so that a test knows what is pruned."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        return torch.arange(count)

    def end_interval(self, weight: Tensor) -> None: ...


def _left_out(run: Trained) -> dict[str, tuple[int, int]]:
    """By layer the contraction columns ``[start, stop)`` that this rank prunes.

    For a block it is enough to list them for the row-parallel weight: units with zero output weights have no gradient.
    """
    found = {}
    for name, layer in hetero_layers(run.model.unwrap()).items():
        if layer.block is not None and layer.block.output is not layer:
            continue
        if layer.block is None:
            columns = layer.contraction_columns
            assert layer.workload is not None and layer._migration is not None
            given = layer._migration.given
            start, size, units = max(1, layer.workload.kept_count(columns) - given), 1, columns
        else:
            assert layer.block.workload is not None
            start, given, units = layer.block.workload.kept, layer.block.workload.given, layer.block.units
            size = layer.block.places[-1][0].size
        assert given > 0, name
        found[name] = (start * size, (units - given) * size)
    assert any(start < stop for start, stop in found.values()), "nothing is pruned"
    return found


def _train_without(run: Trained, iterations: int, left_out: dict[str, tuple[int, int]]) -> Trained:
    """Go on with ``run``, Colossal-AI's, on a model whose weights lack these columns in forward and backward."""
    weights = {name: module.weight for name, module in run.model.unwrap().named_modules() if name in left_out}
    assert len(weights) == len(left_out)
    for iteration in range(iterations):
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, (start, stop) in left_out.items():
            weights[name].data[:, start:stop] = 0
        images, labels = batch(iteration)
        loss = loss_of(run.model(images), labels)
        run.losses.append(loss.item())
        run.booster.backward(loss, run.optimizer)
        for name, (start, stop) in left_out.items():
            weights[name].data.copy_(kept[name])
            weights[name].grad[:, start:stop] = 0
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run


def check_semi() -> None:
    for sender in (0, 1):
        for method in METHODS:
            what = f"{method}, sender {sender}"
            with scripted(slow(sender)), patch.object(apply, "make_selector", First):
                # What may not be pruned is migrated.
                run = boost(ours(migrate(method, mode="semi", max_resize=0.3), tp_size=2), None, sgd)
                train(run, IN_FORCE)
                plan = run.plugin.balancer.plan
                assert plan.resize[sender] > 0.1 and plan.migrate[sender] > 0.1, f"{what}: {plan}"
                left_out = _left_out(run) if dist.get_rank() == sender else {}
                train(run, ITERATIONS)
            assert run.plugin.balancer.plan == plan, what
            expected = train(boost(theirs(tp_size=2), None, sgd), IN_FORCE)
            assert_equal(run, _train_without(expected, ITERATIONS, left_out), what)


def test_a_rank_that_prunes_and_migrates_trains_the_rest_exactly() -> None:
    run_ranks(2, check_semi)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def check_checkpoints(folder: Path, options: dict[str, Any], sharded: bool) -> None:
    sender = dist.get_world_size() - 1
    for method in METHODS:
        with scripted(slow(sender)):
            run = boost(ours(migrate(method), **options), None, sgd)
        watch = Watch(run)
        train(run, 4, each=watch)
        if sender in dist.get_process_group_ranks(run.plugin.tp_group):
            watch.assert_migrated(1, method)
        saved = run.parameters
        save(run, folder / method, sharded)

        # Into Colossal-AI's plugin, on a model that starts from other weights.
        plain = load(boost(theirs(**options), tiny_vit(seed=5), sgd), folder / method, sharded)
        assert_same_parameters(plain.parameters, saved, f"{method}, Colossal-AI's plugin with our checkpoint")
        train(plain, 3)
        # Saving changes nothing: the run continues to migrate in the same way.
        run.losses.clear()
        train(run, 3, each=watch)
        assert_equal(run, plain, f"{method}, after saving")

        # Back again, while the plan is in force and in the middle of an iteration.
        if run.plugin.pp_size == 1:
            loss_of(run.model(batch(77)[0]), batch(77)[1])
        load(run, folder / method, sharded)
        assert_same_parameters(run.parameters, saved, f"{method}, loaded while migrating")
        run.losses.clear()
        train(run, 3, each=watch)
        assert_equal(run, plain, f"{method}, after loading while migrating")

        # And what the others save is taken while migrating.
        save(plain, folder / f"{method}, theirs", sharded)
        load(run, folder / f"{method}, theirs", sharded)
        run.losses.clear()
        plain.losses.clear()
        assert_equal(train(run, 2, each=watch), train(plain, 2), f"{method}, with Colossal-AI's checkpoint")
        if sender in dist.get_process_group_ranks(run.plugin.tp_group):
            assert watch.plans[-1].migrate[1] > 0.1 and all(watch.messages[IN_FORCE:]), method


@pytest.mark.parametrize(
    "options, sharded",
    [
        pytest.param(dict(tp_size=2), False, id="unsharded"),
        pytest.param(dict(tp_size=2), True, id="sharded"),
        pytest.param(PIPELINE, True, id="sharded-pipeline"),
    ],
)
def test_checkpoints_are_colossalais(options: dict[str, Any], sharded: bool, tmp_path: Path) -> None:
    run_ranks(2 * options.get("pp_size", 1), check_checkpoints, tmp_path, options, sharded)
