"""Units that are permanently re-sharded: training and evaluation are those of the unsharded model in one process, with
each optimizer and with several, and where units cannot change their rank, they migrate in each iteration."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from colossal_hetero.checkpoint.optimizer_memory import masters_of
from colossal_hetero.layers import unit_mover
from colossal_hetero.profiling.preserved_state import inner_optimizer
from tests.parallel.balance.test_reports import sentences
from tests.support import training, uneven_runs
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.harness import errors_of_the_others
from tests.support.migration_runs import draw_by_unit, give, migrate
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, batch, boost, by_labels, ours, read_weights, scripted, tiny_vit
from tests.support.uneven_runs import STEPS, adamw, config, relieved_run, small_vit, train, train_alone, uneven_run

AFTER = 2  # iterations in which a rank is relieved before its units are permanently re-sharded
FASTER, RECOVERY, LAST = 6, 13, 19
"""The iterations in which the slow rank becomes faster, and as fast as the others again."""


def slow_until_recovery(straggler: int) -> training.SlowdownScript:
    """The straggler is slow, and the other ranks differ a little; later the next rank becomes slow, if there are more
    than two."""

    def slowdown(rank: int, iteration: int) -> float:
        if iteration >= RECOVERY:
            return 1.0
        if rank == straggler:
            return 2.5 if iteration >= FASTER else 4.0
        if iteration >= FASTER and dist.get_world_size() > 2 and rank == (straggler + 1) % dist.get_world_size():
            return 4.0
        return 1.0 + 0.2 * (rank % 3)

    return slowdown


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = uneven_runs.loss_of(model, LAST).item()
    model.train()
    return loss


def _train_with_a_straggler(folder: Path, straggler: int) -> dict[str, Any]:
    with scripted(slow_until_recovery(straggler)):
        plugin = ours(
            migrate("block", reshard_after=AFTER), tp_size=dist.get_world_size(), max_norm=uneven_runs.MAX_NORM
        )
        run = boost(plugin, small_vit(), adamw)
    balancer, weight = run.plugin.balancer, run.model.unwrap().blocks[0].mlp.fc1.weight
    sent, widths = [], []

    def watch(step: int) -> None:
        widths.append(len(weight))
        sent.append(sum(found.messages for found in balancer.traffic.sent.values()))
        balancer.traffic.reset()

    train(run, RECOVERY, watch)
    evaluated = evaluate(run.model)
    run.booster.save_model(run.model, str(folder / f"uneven-{straggler}"), shard=True)
    train(run, LAST - RECOVERY, watch)
    run.booster.save_model(run.model, str(folder / f"even-{straggler}"), shard=True)
    if (records := balancer.collect()) is not None:
        moved = [(record.ranks[straggler].migrated > 0, record.ranks[straggler].resharded > 0) for record in records]
        # An iteration without a plan, some in which units migrate, then those in which they are permanently re-sharded.
        assert list(dict.fromkeys(moved)) == [(False, False), (True, False), (False, True)], moved
        assert moved[-1] == (False, False)
    return dict(widths=widths, sent=sent, losses=[*run.losses, evaluated, evaluate(run.model)])


@on(2)
@on(3)
@if_thorough(4)
def training_is_that_of_the_unsharded_model_in_one_process(folder: Path) -> None:
    ranks, expected = dist.get_world_size(), {"uneven": train_alone(RECOVERY)[0], "even": train_alone(LAST)[0]}
    losses = [*train_alone(LAST)[1], *map(evaluate, expected.values())]
    even = 60 // ranks
    for straggler in range(ranks):
        found = of_all_ranks(_train_with_a_straggler(folder, straggler))
        held, later = ([of_rank["widths"][step - 1] for of_rank in found] for step in (FASTER, RECOVERY))
        assert sum(held) == 60 and held[straggler] < even < max(held)
        assert ranks == 2 or len({*held[:straggler], *held[straggler + 1 :]}) > 1, held
        # When speeds changed, some units moved, and the straggler did not take all of its own back.
        assert held[straggler] < later[straggler] < even
        assert ranks == 2 or later[(straggler + 1) % ranks] < even, later
        assert even not in found[straggler]["widths"][FASTER:RECOVERY]
        for rank, of_rank in enumerate(found):
            where = f"rank {rank}, straggler {straggler}"
            assert of_rank["losses"] == pytest.approx(losses, rel=1e-10), where
            assert of_rank["widths"][-1] == even, where
            # Weights migrate before; nothing is sent while units are permanently re-sharded.
            assert rank != straggler or max(of_rank["sent"]) > 0, where
            assert of_rank["sent"][FASTER - 1] == of_rank["sent"][RECOVERY - 1] == 0, f"{where}: {of_rank['sent']}"
        for name, model in expected.items():
            weights = read_weights(folder / f"{name}-{straggler}")
            assert uneven_runs.largest_difference(weights, model.state_dict()) <= 1e-10, f"{name}, {straggler}"


KINDS: dict[type[Optimizer], dict[str, Any]] = {
    torch.optim.SGD: dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    torch.optim.Adam: dict(lr=3e-3, amsgrad=True, foreach=False),
    torch.optim.Adamax: dict(lr=3e-3),
    torch.optim.NAdam: dict(lr=3e-3),
    torch.optim.RAdam: dict(lr=3e-3),
    torch.optim.RMSprop: dict(lr=1e-3, centered=True, momentum=0.5),
    torch.optim.Adadelta: dict(lr=0.1),
    torch.optim.ASGD: dict(lr=0.05),
    torch.optim.Rprop: dict(lr=1e-3),
}


class OtherSGD(SGD):
    """Another class might update parameters in another way."""


def made(kind: Any, model: nn.Module, **options: Any) -> Optimizer:
    return kind(model.parameters(), **options)


@on(2)
def each_kind_of_optimizer_trains_as_in_one_process() -> None:
    for kind, options in KINDS.items():
        make = partial(made, kind, **options)
        run = uneven_run(1, make)
        train(run, STEPS)
        assert run.plugin.balancer.has_resharded, kind
        assert run.losses == pytest.approx(train_alone(STEPS, make)[1], rel=1e-10), kind


@on(2, "bf16")
@on(2, "fp16")
def masters_move_with_the_parameters(precision: str) -> None:
    def state(run: Trained) -> dict[str, Tensor]:
        found = {}
        with run.plugin.balancer.ordinary_shards():
            masters = masters_of(run.optimizer)
            for name, weight in run.model.unwrap().named_parameters():
                master = masters[id(weight)].tensor
                kept = dict(inner_optimizer(run.optimizer).state[master])
                for entry, value in dict(values=weight, master=master, **kept).items():
                    found[f"{name} {entry}"] = value.detach().clone()
        return found

    options = dict(precision=precision, max_norm=0.5, initial_scale=16)
    uneven, migrating = (
        relieved_run(1, tiny_vit(depth=1), choices=dict(reshard_after=after), **options) for after in (1, None)
    )
    train(uneven, 1)
    train(migrating, 1)
    assert uneven.plugin.balancer.has_resharded
    actual, expected = state(uneven), state(migrating)
    assert list(actual) == list(expected)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    train(uneven, STEPS)
    train(migrating, STEPS)
    assert uneven.losses == pytest.approx(migrating.losses, rel=0.02)


Parameters = list[nn.Parameter]


def parts_of(model: nn.Module) -> tuple[Parameters, Parameters]:
    matrices = [each for name, each in model.named_parameters() if "blocks" in name and each.ndim == 2]
    return matrices, [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]


def sgd_of(parameters: Parameters) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9)


def adamw_of(parameters: Parameters) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def other_of(parameters: Parameters) -> Optimizer:
    return OtherSGD(parameters, lr=0.1)


@dataclass(frozen=True)
class Several:
    make: Callable[[Parameters, Parameters], Sequence[Optimizer]]
    boosted: tuple[bool, ...] = (True, True)  # which of the optimizers are boosted; the others make steps as torch's do
    for_good: bool = True  # whether units can be permanently re-sharded
    adds: bool = False  # whether the second optimizer gets the first half of the matrices before the third step


SEVERAL = {
    "two that are boosted": Several(lambda matrices, rest: (sgd_of(matrices), adamw_of(rest))),
    "one that is not boosted": Several(lambda matrices, rest: (sgd_of(rest), adamw_of(matrices)), (True, False)),
    "the same parameters": Several(lambda matrices, rest: (sgd_of(matrices + rest), adamw_of(matrices))),
    "more parameters later": Several(lambda matrices, rest: (sgd_of(matrices[1::2]), adamw_of(rest)), adds=True),
    "another kind, boosted": Several(lambda matrices, rest: (sgd_of(matrices), other_of(rest)), for_good=False),
    "another kind, not boosted": Several(
        lambda matrices, rest: (sgd_of(rest), other_of(matrices)), (True, False), for_good=False
    ),
}


def _trained(case: Several, booster: Booster | None = None, straggler: int = 0) -> tuple[Any, Any, list[float]]:
    model: Any = small_vit().train()
    parts = parts_of(model)
    added = parts[0][::2] if case.adds else []
    optimizers: list[Any] = list(case.make(*parts))
    backward: Callable[[Tensor], Any] = Tensor.backward
    if booster is not None:
        for number, is_boosted in enumerate(case.boosted):
            if is_boosted:
                model, optimizers[number], *_ = booster.boost(model, optimizers[number])
        give(booster.plugin, straggler)
        backward = partial(booster.backward, optimizer=optimizers[0])

    def add() -> None:
        if added:
            optimizers[1].add_param_group(dict(params=added))

    def forget() -> None:
        for parameter in added:
            parameter.grad = None

    losses = uneven_runs.train_in_parts(
        model, optimizers, backward, 4, before={1: forget, 2: lambda: (forget(), add())}
    )
    return model, optimizers, losses


@on(2, 6)
@on(3, 2)
def several_optimizers_train_as_in_one_process(cases: int, folder: Path) -> None:
    ranks = dist.get_world_size()
    for number, name in enumerate(list(SEVERAL)[:cases]):
        case = SEVERAL[name]
        expected, _, wanted = _trained(case)
        for straggler in range(ranks) if IS_THOROUGH else (number % ranks,):
            what = f"{name}, rank {straggler} is slow"
            booster = Booster(plugin=ours(config(reshard_after=2), tp_size=ranks))
            with scripted():
                model, optimizers, losses = _trained(case, booster, straggler)
            assert booster.plugin.balancer.plan.migrate[straggler] > 0.1, what
            assert booster.plugin.balancer.has_resharded == case.for_good, what
            assert losses == pytest.approx(wanted, rel=1e-10), what
            path = folder / f"{name}-{straggler}"
            booster.save_model(model, str(path), shard=False)
            dist.barrier()
            saved = torch.load(path, weights_only=True)
            for key, value in expected.state_dict().items():
                assert torch.allclose(saved[key], value, 1e-9, 1e-10), f"{what}: {key}"
            if number == 0:
                for optimizer, part, entry in zip(
                    optimizers, parts_of(expected), ("momentum_buffer", "exp_avg"), strict=True
                ):
                    _assert_saved_whole(booster, optimizer, folder / f"{entry}-{straggler}", part, entry)


def _assert_saved_whole(booster: Booster, optimizer: Any, path: Path, parameters: Sequence[Tensor], entry: str) -> None:
    booster.save_optimizer(optimizer, str(path), shard=False)
    dist.barrier()
    states = torch.load(path, weights_only=True)["state"]
    assert [states[place][entry].shape for place in range(len(parameters))] == [each.shape for each in parameters]
    booster.load_optimizer(optimizer, str(path))


@on(2)
def a_model_is_boosted_before_its_optimizer(folder: Path) -> None:
    booster = Booster(plugin=ours(config(), tp_size=2))
    model, *_ = booster.boost(small_vit())
    model, optimizer, *_ = booster.boost(model, adamw_of(list(model.parameters())))
    booster.backward(uneven_runs.loss_of(model, 0), optimizer)
    optimizer.step()
    _assert_saved_whole(booster, optimizer, folder / "first", list(small_vit().parameters()), "exp_avg")


@on(2)
def what_cannot_be_boosted_is_refused() -> None:
    booster = Booster(plugin=ours(config(), tp_size=2))
    model = small_vit()
    matrices, rest = parts_of(model)
    with scripted():
        boosted, optimizer, *_ = booster.boost(model, sgd_of(matrices))
    with pytest.raises(ValueError, match=r"given to booster.boost before.* give booster.boost the model that it has"):
        booster.boost(model, adamw_of(rest))
    with pytest.raises(ValueError, match="another plugin has boosted this model"):
        Booster(plugin=ours(config(), tp_size=2)).boost(boosted, adamw_of(rest))
    balancer = booster.plugin.balancer
    assert booster.boost(boosted, adamw_of(rest))[0] is boosted
    assert booster.plugin.balancer is balancer
    give(booster.plugin, 1)
    uneven_runs.train_in_parts(boosted, [optimizer], partial(booster.backward, optimizer=optimizer), 4)
    assert balancer.has_resharded
    words = r"permanently re-sharded, and now OtherSGD is not known.* before the first step"
    with pytest.raises(ValueError, match=words):
        booster.boost(boosted, other_of(rest))


@on(3)
def dropout_and_frozen_weights() -> None:
    found = []
    for straggler in (None, 0):
        Randomizer.reset_index()
        model = tiny_vit(attn_drop_rate=0.2, proj_drop_rate=0.2).double()
        model.blocks[0].mlp.requires_grad_(False)
        torch.manual_seed(11)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        run = relieved_run(straggler, model, lambda _, trained=trained: AdamW(trained, lr=3e-3))
        if straggler is None:
            draw_by_unit(run)
        train(run, STEPS)
        found.append(run.losses)
    assert run.plugin.balancer.has_resharded
    assert found[1] == pytest.approx(found[0], rel=1e-10)


def deep_vit() -> nn.Module:
    return tiny_vit().double()


@on(4)
def a_pipeline_whose_stages_move_units_at_other_times(folder: Path) -> None:
    run = relieved_run(1, deep_vit(), tp_size=2, pp_size=2, num_microbatches=2, max_norm=uneven_runs.MAX_NORM)
    for step in range(4):
        images, labels = batch(step)
        with uneven_runs.exact_norms():
            loss = training.pipeline_step(run, iter([(images.double(), labels)]), in_double)
        run.losses += [] if loss is None else [loss]
        if step == 1:
            # The first stage has moved units, and the second one has not.
            assert run.plugin.balancer.has_resharded == (dist.get_rank() < 2)
            give(run.plugin, 2)
            run.booster.save_model(run.model, str(folder / "2"), shard=True)
    assert run.plugin.balancer.has_resharded
    run.booster.save_model(run.model, str(folder / "4"), shard=True)
    # The pipeline adds up losses in fp32.
    is_last = dist.get_rank() >= 2
    assert run.losses == pytest.approx(train_alone(4, make_model=deep_vit)[1] if is_last else [], rel=1e-6)
    dist.barrier()
    for steps in (2, 4):
        expected = train_alone(steps, make_model=deep_vit)[0].state_dict()
        assert uneven_runs.largest_difference(read_weights(folder / str(steps)), expected) <= 1e-10, steps


def in_double(outputs: Tensor, inputs: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, inputs[1])


@on(2, dict(zero_stage=1, precision="bf16"), adamw, "ZeRO stage 1")
@on(4, {}, adamw, "2 replicas")
@on(2, {}, partial(made, OtherSGD), "OtherSGD is not known")
def elsewhere_units_migrate_in_each_iteration(
    options: dict[str, Any], make: Callable[[nn.Module], Optimizer], reason: str
) -> None:
    images, labels = batch()
    with sentences() as said:
        run = relieved_run(dist.get_rank() // 2 * 2 + 1, tiny_vit(depth=1), make, tp_size=2, **options)
        for _ in range(STEPS):
            run.finish(by_labels(run.model(images).float(), (images, labels)))
    assert not run.plugin.balancer.has_resharded
    assert run.plugin.balancer.shares.migrated + run.plugin.balancer.shares.received > 0
    first, *others = of_all_ranks(said)
    assert len(first) == 1 and reason in first[0], first
    assert not any(others)


@on(2, "DefaultCPUAllocator: can't allocate memory", 14)
@on(2, "broken", 1)
def units_migrate_if_there_is_too_little_memory(error: str, failing: int) -> None:
    """Rank 1 has too little memory for the second block whose units it is given. Other errors are raised."""
    run, calls, resized = uneven_run(0), list[Any](), unit_mover._resized

    def allocate(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if len(calls) == failing and (dist.get_rank() == 1 or error == "broken"):
            raise RuntimeError(error)
        return resized(*arguments)

    with patch.object(unit_mover, "_resized", allocate):
        if error == "broken":
            with pytest.raises(RuntimeError, match=error):
                train(run, STEPS)
            return
        train(run, STEPS)
    assert not run.plugin.balancer.has_resharded and len(calls) > failing
    assert run.plugin.balancer.shares.migrated + run.plugin.balancer.shares.received > 0
    assert run.losses == pytest.approx(train_alone(STEPS)[1], rel=1e-10)


def _die_while_units_move(victim: int, function: str) -> None:
    original = getattr(unit_mover, function)

    def die(*arguments: Any) -> Any:
        if dist.get_rank() == victim:
            os._exit(1)
        return original(*arguments)

    with patch.object(unit_mover, function, die):
        train(uneven_run(0), STEPS)
    raise AssertionError("training ended without an error although a rank died")


@pytest.mark.parametrize(("victim", "function"), [(0, "_messages"), (1, "_fill")])
def test_if_a_rank_dies_while_units_move_the_others_end(victim: int, function: str) -> None:
    errors = errors_of_the_others(3, _die_while_units_move, victim, function, victim=victim)
    assert all("RuntimeError" in error for error in errors)
