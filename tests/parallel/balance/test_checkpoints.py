"""Checkpoints are interchangeable with Colossal-AI's plugin while columns are pruned, while work migrates, and while
units are permanently re-sharded; deep copies of a boosted model have the same averages."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import keystr, tree_flatten_with_path

from colossal_hetero import BalanceConfig, CheckpointConfig, Pruning
from colossal_hetero.balance import BalancePlan
from tests.support import training
from tests.support.checks import on
from tests.support.language_models import llama, tokens, train_on_tokens
from tests.support.migration_runs import assert_equal, migrating_run, reference_run
from tests.support.training import Trained, batch, boost, load_checkpoint, save_checkpoint, sgd, tiny_vit
from tests.support.training import train as train_more
from tests.support.uneven_runs import STEPS, adamw, small_vit, train, uneven_run

RULES = Pruning(resizing="column", priority="priority", imputation="same", priority_interval=2)
RESIZE = BalanceConfig(mode="resize", warmup_iterations=10**6, pruning=RULES)
PIPELINE = dict(tp_size=2, pp_size=2, num_microbatches=3)
MORE = 2


def start(method: str, seed: int = 0, idle: bool = False, **options: Any) -> Trained:
    """A run in which the last rank of the last stage prunes or gives work away, unless it is ``idle``."""
    model = tiny_vit(seed, depth=options.get("pp_size", 1))
    if method != "resize":
        return migrating_run(method, () if idle else dist.get_world_size() - 1, model, **options)
    run = boost(training.ours(RESIZE, **options), model, sgd)
    if not idle:
        run.plugin.balancer.follow(BalancePlan.resizing((0.0, 0.75)))
    return run


@on(2, "resize", dict(tp_size=2, precision="bf16"), True)
@on(2, "broadcast-reduce", dict(tp_size=2), False)
@on(4, "block", PIPELINE, True)
def checkpoints_are_interchangeable(method: str, options: dict[str, Any], sharded: bool, folder: Path) -> None:
    run = start(method, **options)
    plan = run.plugin.balancer.plan
    train_more(run, 2)
    saved = run.parameters
    save_checkpoint(run, folder / "ours", sharded)
    for source in ("ours", "theirs"):
        # Each checkpoint is loaded into models that start from other weights.
        model = tiny_vit(seed=5, depth=options.get("pp_size", 1))
        plain = load_checkpoint(reference_run(model, **options), folder / source, sharded)
        idle = load_checkpoint(start(method, seed=6, idle=True, **options), folder / source, sharded)
        if source == "ours":
            training.assert_same_parameters(plain.parameters, saved, "Colossal-AI's plugin with our checkpoint")
        else:
            # Our run loads it while its plan applies, in the middle of an iteration.
            if run.plugin.pp_size == 1:
                run.model(batch(77)[0])
            load_checkpoint(run, folder / source, sharded)
            training.assert_same_parameters(run.parameters, plain.parameters, "loaded while the plan applies")
        training.assert_same_parameters(idle.parameters, plain.parameters, f"our plugin with the checkpoint {source}")
        for each in (run, plain, idle):
            each.losses.clear()
            train_more(each, 2)
        assert idle.losses == plain.losses
        training.assert_same_parameters(
            idle.parameters, plain.parameters, f"training continued from the checkpoint {source}"
        )
        if method != "resize":
            assert_equal(run, plain, f"after saving or loading {source}")
        if source == "ours":
            save_checkpoint(plain, folder / "theirs", sharded)
    assert run.plugin.balancer.plan == plan
    if not sharded:
        alone = tiny_vit(seed=8, depth=1).eval()
        alone.load_state_dict(torch.load(folder / "ours" / "model.pt", weights_only=True))
        load_checkpoint(idle, folder / "ours", sharded)
        idle.model.eval()
        with torch.no_grad():
            torch.testing.assert_close(idle.model(batch()[0]), alone(batch()[0]), rtol=1e-4, atol=1e-5)


def is_uneven(run: Trained) -> bool:
    width = len(run.model.unwrap().blocks[0].mlp.fc1.weight)
    anywhere = torch.tensor(width != 60 // dist.get_world_size(), dtype=torch.int)
    dist.all_reduce(anywhere)
    return bool(anywhere)


def contents(folder: Path) -> dict[str, Any]:
    """All values in the files of a folder by their places, and how they are nested."""
    found: dict[str, Any] = {}
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        content = path.read_text() if path.suffix == ".json" else torch.load(path, weights_only=True)
        values, found[path.name] = tree_flatten_with_path(content)
        found |= {f"{path.name}{keystr(place)}": value for place, value in values}
    return found


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert (actual[name].shape, actual[name].dtype) == (value.shape, value.dtype), name
            assert float((actual[name].double() - value.double()).abs().max()) <= tolerance, name
        else:
            assert actual[name] == value, name


def plain_run(seed: int = 0) -> Trained:
    return boost(training.theirs(tp_size=dist.get_world_size(), max_norm=0.5), small_vit(seed), adamw)


@on(2, 1, (True, False))
@on(3, 0, (True,))
def checkpoints_of_colossalais_format_are_ordinary(straggler: int, forms: Sequence[bool], folder: Path) -> None:
    run = uneven_run(straggler)
    train(run, STEPS)
    assert is_uneven(run)
    for sharded in forms:
        save_checkpoint(run, folder / f"uneven {sharded}", sharded)
    assert is_uneven(run)

    # The same weights and state after the units have been taken back.
    with run.plugin.balancer.ordinary_shards():
        assert not is_uneven(run)
        for sharded in forms:
            save_checkpoint(run, folder / f"even {sharded}", sharded)
    assert is_uneven(run)

    plain = plain_run()
    train(plain, STEPS)
    for sharded in forms:
        save_checkpoint(plain, folder / f"plain {sharded}", sharded)
        # An ordinary run goes on from it as the uneven one does.
        resumed = load_checkpoint(plain_run(seed=3), folder / f"uneven {sharded}", sharded)
        resumed.losses = run.losses[:STEPS]
        train(resumed, MORE)
        if sharded:
            train(run, MORE)
        assert resumed.losses == pytest.approx(run.losses, rel=1e-10)

    # An uneven run loads an ordinary checkpoint, and saves between a backward pass and the step.
    load_checkpoint(run, folder / "plain True", True)
    assert is_uneven(run)
    train(plain, MORE)
    run.losses, backward = run.losses[:STEPS], run.booster.backward

    def backward_and_save(loss: torch.Tensor, optimizer: Any) -> None:
        backward(loss, optimizer)
        run.booster.save_model(run.model, str(folder / "between"), shard=True)

    run.booster.backward = backward_and_save  # type: ignore[method-assign]
    train(run, MORE)
    assert is_uneven(run)
    assert run.losses == pytest.approx(plain.losses, rel=1e-10)
    dist.barrier()
    for sharded in forms:
        found = contents(folder / f"uneven {sharded}")
        assert_same(found, contents(folder / f"even {sharded}"), 0.0)
        assert_same(found, contents(folder / f"plain {sharded}"), 1e-10)


@on(2)
def layer_checkpoints_are_ordinary(folder: Path) -> None:
    def begin(straggler: int | None, seed: int) -> Trained:
        return uneven_run(straggler, seed=seed, checkpoints=CheckpointConfig(shared=folder, save_every=STEPS))

    def sent() -> int:
        return sum(found.messages for found in run.plugin.balancer.traffic.sent.values())

    def save(step: int) -> None:
        before = sent()
        run.plugin.save(run.model, run.optimizer, step=step + 1)
        messages.append(sent() - before)

    run, messages = begin(0, 0), list[int]()
    train(run, STEPS + MORE, save)
    run.plugin.wait_for_saves()
    assert is_uneven(run)
    # Units are taken back only for the step that is saved.
    assert messages[STEPS - 1] > 0 and sum(messages) == messages[STEPS - 1], messages
    for straggler, other in ((None, begin(None, 3)), (1, begin(1, 4))):
        if straggler is not None:
            train(other, STEPS)
            assert is_uneven(other)
        assert other.plugin.resume(other.model, other.optimizer).step == STEPS
        other.losses = run.losses[:STEPS]
        train(other, MORE)
        assert other.losses == pytest.approx(run.losses, rel=1e-10), straggler


# Deep copies, for moving averages ------------------------------------------------------------------------------------


def images(model: Any) -> Tensor:
    return model(batch()[0])


def logits(model: Any) -> Tensor:
    inputs, _ = tokens(0)
    return model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits


LLAMA = dict(make_vocab_size_divisible_by=4)
FAMILIES: tuple[tuple[Callable[[], nn.Module], Any, Any, Any, Callable[[Any], Tensor]], ...] = (
    (lambda: tiny_vit(depth=1), {}, {}, train_more, images),
    (lambda: llama(layers=1), LLAMA | dict(custom_policy=None), LLAMA, train_on_tokens, logits),
)


@on(2)
@on(3)
def averages_of_weights_are_exact() -> None:
    ranks = dist.get_world_size()
    for sender, (make, theirs_options, options, train_one, outputs) in enumerate(FAMILIES[: 4 - ranks]):
        expected = boost(training.theirs(tp_size=ranks, **theirs_options), make(), sgd)
        run = migrating_run("block", sender, make(), choices=dict(reshard_after=2), tp_size=ranks, **options)
        average = AveragedModel(run.model.unwrap())
        moving = ModelEmaV3(run.model, decay=0.5, exclude_buffers=True)
        means = [torch.zeros_like(value) for value in expected.parameters.values()]
        movings = [value.clone() for value in expected.parameters.values()]
        for _ in range(STEPS):
            train_one(expected, 1)
            train_one(run, 1)
            average.update_parameters(run.model.unwrap())
            moving.update(run.model)
            for mean, ema, value in zip(means, movings, expected.parameters.values(), strict=True):
                mean.add_(value / STEPS)
                ema.lerp_(value, 0.5)
        assert sum(run.plugin.balancer.plan.migrate) > 0.1 and not run.plugin.balancer.has_resharded
        assert_equal(run, expected, f"rank {sender} slow")
        later = copy.deepcopy(copy.deepcopy(run.model)).eval()
        assert run.model.training and run.model.unwrap().training
        expected.model.eval()
        with torch.no_grad():
            for made, values in ((later, None), (copy.deepcopy(average).eval(), means), (moving, movings)):
                for parameter, value in zip(expected.model.unwrap().parameters(), values or (), strict=False):
                    parameter.data.copy_(value)
                torch.testing.assert_close(outputs(made), outputs(expected.model), rtol=1e-4, atol=1e-4)
        with pytest.raises(RuntimeError, match=r"cannot be averaged by state_dict: use parameters\(\)"):
            ModelEmaV3(run.model).update(run.model)
        train_one(run, 1)


@on(2)
@on(3)
def copies_can_be_trained() -> None:
    def make() -> nn.Module:
        return tiny_vit(depth=1, act_layer=nn.PReLU)

    alone = make().train()
    run = boost(training.ours(BalanceConfig(mode="off"), tp_size=dist.get_world_size()), make(), sgd)
    copied = copy.deepcopy(copy.deepcopy(run.model)).train()
    for model in (alone, copied):
        training.train_alone(model, sgd(model), map(batch, range(3)))
    torch.testing.assert_close(copied.blocks[0].mlp.act.weight, alone.blocks[0].mlp.act.weight, rtol=1e-5, atol=1e-6)


@on(2)
def copies_keep_the_shapes_of_parameters() -> None:
    run = migrating_run("block", 1, choices=dict(reshard_after=2), tp_size=2)
    train_more(run, STEPS)
    assert run.plugin.balancer.has_resharded
    with pytest.raises(RuntimeError, match=r"copied after units were permanently re-sharded.*reshard_after=None"):
        copy.deepcopy(run.model)
    # A copy on one rank alone keeps the shapes on all.
    run = migrating_run("block", 1, choices=dict(reshard_after=2), tp_size=2)
    if dist.get_rank() == 0:
        copy.deepcopy(run.model.unwrap())
    train_more(run, STEPS)
    assert not run.plugin.balancer.has_resharded and sum(run.plugin.balancer.plan.migrate) > 0.1


@on(1)
def models_of_one_rank_are_copied() -> None:
    run = boost(training.ours(BalanceConfig(mode="off"), tp_size=1), None, sgd)
    seen: list[nn.Module] = []
    run.model.unwrap().blocks[0].register_forward_hook(lambda module, *_: seen.append(module))
    made = copy.deepcopy(run.model)
    train_more(run, 1)
    torch.testing.assert_close(made.state_dict(), tiny_vit().state_dict())
    seen.clear()
    made(batch()[0])
    assert seen == [made.blocks[0]]
