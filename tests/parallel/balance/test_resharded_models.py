"""Models, optimizers and options with units that are permanently re-sharded; the reference is one process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn

from colossal_hetero.checkpoint.optimizer_memory import masters_of
from colossal_hetero.layers import unit_mover
from colossal_hetero.profiling.preserved_state import inner_optimizer
from tests.support.checkpoints import read_weights
from tests.support.checks import Checks, of_all_ranks
from tests.support.harness import errors_of_the_others, run_ranks
from tests.support.migration_runs import draw_by_unit
from tests.support.training import Trained, batch, tiny_vit
from tests.support.uneven_runs import (
    MAX_NORM,
    STEPS,
    adamw,
    exact_norms,
    largest_difference,
    relieve,
    relieved_run,
    train,
    train_alone,
    uneven_run,
)

checks = Checks()

# Optimizers -----------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, amsgrad=True, foreach=False),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=3e-3),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=3e-3),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=3e-3),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True, momentum=0.5),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.1),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.05),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-3),
}


@checks.on(2)
def optimizers() -> None:
    for name, make in OPTIMIZERS.items():
        run = uneven_run(1, make)
        train(run, STEPS)
        assert run.plugin.balancer.has_resharded, name
        assert run.losses == pytest.approx(train_alone(STEPS, make)[1], rel=1e-10), name


# Half precision -------------------------------------------------------------------------------------------------------


@checks.on(2, "bf16")
@checks.on(2, "fp16")
def masters_move_with_the_parameters(precision: str) -> None:
    """Give units away for good, and compare everything with a run that does not."""

    def state(run: Trained) -> dict[str, Tensor]:
        """Parameters, masters and moments with ordinary shards."""
        found = {}
        with run.plugin.balancer.ordinary_shards():
            masters = masters_of(run.optimizer)
            for name, weight in run.model.unwrap().named_parameters():
                master = masters[id(weight)].tensor
                kept = dict(inner_optimizer(run.optimizer).state[master])
                for entry, value in dict(values=weight, master=master, **kept).items():
                    found[f"{name} {entry}"] = value.detach().clone()
        return found

    runs = []
    for after in (1, None):
        options = dict(precision=precision, max_norm=0.5, initial_scale=16)
        runs.append(relieved_run(1, tiny_vit(depth=1), choices=dict(reshard_after=after), **options))
    uneven, migrating = runs
    for run in runs:
        train(run, 1)
    assert uneven.plugin.balancer.has_resharded
    actual, expected = state(uneven), state(migrating)
    assert list(actual) == list(expected)
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name
    for run in runs:
        train(run, STEPS)
    assert uneven.losses == pytest.approx(migrating.losses, rel=0.02)


# Dropout, frozen weights, kept losses ---------------------------------------------------------------------------------


@checks.on(3)
def dropout_and_frozen_weights() -> None:
    """Without and with a straggler; the hidden neurons of the first MLP are frozen."""
    found = []
    for straggler in (None, 0):
        Randomizer.reset_index()
        model = tiny_vit(attn_drop_rate=0.2, proj_drop_rate=0.2).double()
        for weight in model.blocks[0].mlp.parameters():
            weight.requires_grad_(False)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        torch.manual_seed(11)
        run = relieved_run(straggler, model, lambda _, trained=trained: torch.optim.AdamW(trained, lr=3e-3))
        if straggler is None:
            draw_by_unit(run)
        train(run, STEPS)
        found.append(run.losses)
    assert run.plugin.balancer.has_resharded
    without, given = found
    assert given == pytest.approx(without, rel=1e-10)


# Pipelines ------------------------------------------------------------------------------------------------------------


def deep_vit() -> nn.Module:
    return tiny_vit().double()


def _losses_in_a_pipeline(folder: Path) -> list[float]:
    """Two stages of two ranks, of which one in each stage is relieved from other iterations on."""
    run = relieved_run(1, tiny_vit().double(), tp_size=2, pp_size=2, num_microbatches=2, max_norm=MAX_NORM)
    plugin = run.plugin
    widths = []
    for step in range(4):
        images, labels = batch(step)
        result = run.booster.execute_pipeline(
            iter([(images.double(), labels)]),
            run.model,
            lambda outputs, inputs: nn.functional.cross_entropy(outputs, inputs[1]),
            run.optimizer,
            return_loss=True,
        )
        with exact_norms():
            run.optimizer.step()
        run.optimizer.zero_grad()
        widths.append(plugin.balancer.has_resharded)
        if result["loss"] is not None:
            run.losses.append(result["loss"].item())
        if step == 1:
            # The first stage has moved units, and the second one has not.
            assert widths[-1] == (dist.get_rank() < 2)
            relieve(plugin, 2)
            run.booster.save_model(run.model, str(folder / "one"), shard=True)
    assert widths[-1]
    run.booster.save_model(run.model, str(folder / "both"), shard=True)
    return run.losses


def test_a_pipeline_whose_stages_move_units_at_other_times(tmp_path: Path) -> None:
    for rank, losses in enumerate(run_ranks(4, _losses_in_a_pipeline, tmp_path)):
        # The pipeline adds up losses in fp32.
        assert losses == pytest.approx(train_alone(4, make_model=deep_vit)[1] if rank >= 2 else [], rel=1e-6)
    for name, steps in (("one", 2), ("both", 4)):
        expected = train_alone(steps, make_model=deep_vit)[0].state_dict()
        assert largest_difference(read_weights(tmp_path / name), expected) <= 1e-10, name


# Where it is not possible ---------------------------------------------------------------------------------------------


class OwnSGD(torch.optim.SGD):
    """May update parameters in another way."""


def own_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OwnSGD(model.parameters())


def _log_without_resharding(options: dict[str, Any], make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[str]:
    """What is logged in training in which units migrate in each iteration, although they might be given away."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("colossal_hetero")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    run = relieved_run(dist.get_rank() // 2 * 2 + 1, tiny_vit(depth=1), make, tp_size=2, **options)
    for _ in range(STEPS):
        images, labels = batch()
        run.booster.backward(nn.functional.cross_entropy(run.model(images).float(), labels), run.optimizer)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert not run.plugin.balancer.has_resharded
    assert run.plugin.balancer.shares.migrated + run.plugin.balancer.shares.received > 0
    return messages


@checks.on(2, dict(zero_stage=1, precision="bf16"), adamw, "ZeRO stage 1")
@checks.on(4, {}, adamw, "2 replicas")
@checks.on(2, {}, own_sgd, "OwnSGD is not known")
def elsewhere_units_migrate_in_each_iteration(
    options: dict[str, Any], make: Callable[[nn.Module], torch.optim.Optimizer], reason: str
) -> None:
    first, *others = of_all_ranks(_log_without_resharding(options, make))
    assert len(first) == 1 and reason in first[0], first
    assert not any(others)


def _without_memory(failing: str) -> tuple[int, list[float]]:
    """Training in which rank 1 has too little memory for the second block whose units it is given."""
    run = uneven_run(0)
    resized, calls = unit_mover._resized, []

    def allocate(*arguments: Any) -> Tensor:
        calls.append(arguments)
        if dist.get_rank() == 1 and len(calls) == 14:
            raise RuntimeError(failing)
        return resized(*arguments)

    with patch.object(unit_mover, "_resized", allocate):
        train(run, STEPS)
    assert not run.plugin.balancer.has_resharded
    assert run.plugin.balancer.shares.migrated + run.plugin.balancer.shares.received > 0
    return len(calls), run.losses


@checks.on(2)
def units_migrate_if_there_is_too_little_memory() -> None:
    calls, losses = _without_memory("DefaultCPUAllocator: can't allocate memory")
    assert calls > 14
    assert losses == pytest.approx(train_alone(STEPS)[1], rel=1e-10)


def test_other_errors_are_raised() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        run_ranks(2, _without_memory, "broken")


def _die_while_units_move(victim: int, function: str) -> None:
    original = getattr(unit_mover, function)

    def die(*arguments: Any) -> Any:
        if dist.get_rank() == victim:
            os._exit(1)
        return original(*arguments)

    with patch.object(unit_mover, function, die):
        train(uneven_run(0), STEPS)
    raise AssertionError("training ended without an error although a rank died")


@pytest.mark.parametrize(("victim", "function"), [(0, "_packed"), (1, "_fill")])
def test_if_a_rank_dies_while_units_move_the_others_end(victim: int, function: str) -> None:
    errors = errors_of_the_others(3, _die_while_units_move, victim, function, victim=victim)
    assert all("RuntimeError" in error for error in errors)


test_on_ranks = checks.test()
