"""Gradients are clipped as torch does in one process: in the step (``max_norm``), and by the optimizer before it.
Checkpoints of models with a padded vocabulary, and of several plugins in one process, have the whole weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from colossal_hetero import HeteroHybridParallelPlugin
from tests.support import training
from tests.support.checks import on
from tests.support.language_models import MODELS
from tests.support.migration_runs import migrate, slow
from tests.support.planning import make_plan, planned
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, assert_same_parameters, boost, ours, read_weights, sgd, theirs, tiny_vit
from tests.support.training import loss_of as vit_loss
from tests.support.training import train as train_vit

SAMPLES = 4
VOCABULARY = 101
MAX_NORM = 0.05  # far below the norm of the gradients, so that they are clipped
SCALE = 2.0**6
VALUE = 2.0**-8  # below the largest element of the gradients, and exact in all precisions

PIPELINE = dict(pp_size=2, num_microbatches=2)
ZERO = dict(zero_stage=1, precision="bf16")
FP32, BF16 = dict(precision="fp32"), dict(precision="bf16")
FP16 = dict(precision="fp16", initial_scale=SCALE)


def make(name: str) -> nn.Module:
    return tiny_vit() if name == "vit" else MODELS[name]()


def global_batch(name: str) -> tuple[Any, ...] | dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        return torch.randn(SAMPLES, 3, 8, 8, generator=generator), torch.arange(SAMPLES)
    ids = torch.randint(VOCABULARY, (SAMPLES, 12), generator=generator)
    return dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))


def loss_of(output: Any, inputs: Any) -> Tensor:
    return nn.functional.cross_entropy(output.float(), inputs[1]) if isinstance(output, Tensor) else output.loss


def run_model(model: nn.Module, inputs: Any) -> Tensor:
    return loss_of(model(**inputs) if isinstance(inputs, dict) else model(inputs[0]), inputs)


def train_alone(name: str) -> tuple[float, dict[str, Tensor]]:
    """The norm of the gradients before clipping, and the clipped change of all weights, in one process."""
    model = make(name)
    run_model(model, global_batch(name)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    return norm, {key: -weight.grad for key, weight in model.named_parameters() if weight.grad is not None}


def descend(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def run_backward(run: Trained, name: str) -> None:
    replica, share = dist.get_rank(run.plugin.dp_group), SAMPLES // run.plugin.dp_size
    inputs = tree_map(lambda tensor: tensor[replica * share : (replica + 1) * share], global_batch(name))
    if run.plugin.pp_size > 1:
        run.booster.execute_pipeline(iter([inputs]), run.model, loss_of, run.optimizer)
    else:
        run.booster.backward(run_model(run.model, inputs), run.optimizer)


def check_change(run: Trained, name: str, change: dict[str, Tensor], folder: Path, what: str) -> None:
    run.booster.save_model(run.model, str(folder), shard=True)
    dist.barrier()
    initial, after = make(name).state_dict(), read_weights(folder)
    error = torch.stack([(after[key] - initial[key] - change[key]).norm() for key in change]).norm()
    assert error <= 1e-3 * MAX_NORM, what


STEP_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tp_size=2, pp_size=1, **FP32)),
    "tp2-pp2": (4, dict(tp_size=2, **PIPELINE, **FP32)),
    "tp2-fp16": (2, dict(tp_size=2, pp_size=1, **FP16)),
    "dp2-zero1": (2, dict(tp_size=1, pp_size=1, **ZERO)),
    "tp2-dp2-zero1": (4, dict(tp_size=2, pp_size=1, **ZERO)),
    "tp2-pp2-zero1": (4, dict(tp_size=2, **PIPELINE, **ZERO)),
}


def check_step(make_plugin: Any, name: str, case: str, folder: Path) -> None:
    expected, change = train_alone(name)
    assert expected > 10 * MAX_NORM
    options = STEP_CASES[case][1]
    run = boost(make_plugin(**options, max_norm=MAX_NORM, custom_policy=None), make(name), descend)
    run_backward(run, name)
    run.optimizer.step()
    is_exact, what = options["precision"] == "fp32", f"{name} {case}"
    norm = float(run.optimizer.get_grad_norm()) / scale_of(run)
    assert norm == pytest.approx(expected, rel=1e-5 if is_exact else 4e-3), what
    if is_exact:
        check_change(run, name, change, folder / f"{make_plugin.__name__}-{name}-{case}", what)


@on(2)
@on(4)
def a_step_clips_by_the_norm_of_the_whole_model(folder: Path) -> None:
    ranks = dist.get_world_size()
    for number, case in enumerate(case for case, (needed, _) in STEP_CASES.items() if needed == ranks):
        # GPT-2 has fused layers, and a weight that two stages share.
        others = ("llama", "vit") if IS_THOROUGH else (("llama", "vit")[number % 2],) if ranks == 2 else ()
        for name in ("gpt2", *others):
            check_step(ours, name, case, folder)
    if ranks == 2:
        check_step(theirs, "gpt2", "tp2", folder)


CASES: dict[str, dict[str, Any]] = {
    f"{layout} {precision['precision']}": options | precision
    for layout, options in (("tp2", dict(tp_size=2, pp_size=1)), ("pp2", dict(tp_size=1, **PIPELINE)))
    for precision in (FP32, BF16, FP16)
}


def trained(run: Trained) -> dict[str, tuple[Any, Any]]:
    masters = getattr(run.optimizer, "working_to_master_map", {})
    named = run.model.unwrap().named_parameters()
    return {name: (each, masters.get(each, each)) for name, each in named if each.grad is not None}


def gradients(run: Trained) -> dict[str, Tensor]:
    return {name: each.grad.detach().clone().float() for name, (each, _) in trained(run).items()}


def scale_of(run: Trained) -> float:
    return SCALE if run.plugin.precision == "fp16" else 1.0


def step_with(run: Trained, what: str, expected: dict[str, Tensor]) -> None:
    pairs, tolerance = trained(run), 1e-5 if run.plugin.precision == "fp32" else 1e-2
    found = gradients(run)
    for name in pairs:
        error = (found[name] - expected[name]).norm()
        assert error <= tolerance * expected[name].norm() + 1e-6, f"{what}: {name}"
    changed = {name: master - found[name] / scale_of(run) for name, (_, master) in pairs.items()}
    run.optimizer.step()
    torch.testing.assert_close({name: master for name, (_, master) in pairs.items()}, changed, msg=what)


@on(2, ours, "gpt2", list(CASES))
@on(2, ours, "vit", ["tp2 fp16", "pp2 fp32"])
@on(2, theirs, "gpt2", ["tp2 fp32", "pp2 bf16"])
def clipping_before_the_step_is_that_of_one_process(
    make_plugin: Any, name: str, cases: list[str], folder: Path
) -> None:
    norm, change = train_alone(name)
    assert norm > 10 * MAX_NORM
    for case in cases:
        what = f"{name} {case}"
        is_exact = CASES[case]["precision"] == "fp32"
        run = boost(make_plugin(**CASES[case], custom_policy=None), make(name), descend)
        run_backward(run, name)
        before = gradients(run)
        found = run.optimizer.clip_grad_by_norm(MAX_NORM)
        assert isinstance(found, Tensor)
        assert float(found) == pytest.approx(norm, rel=1e-5 if is_exact else 4e-3), what
        step_with(run, what, {key: value * (MAX_NORM / norm) for key, value in before.items()})
        if is_exact:
            check_change(run, name, change, folder / f"{make_plugin.__name__}-{name}-{case}", what)
        run.optimizer.zero_grad()

        run_backward(run, name)
        before = gradients(run)
        assert float(run.optimizer.clip_grad_by_norm(1e6)) > MAX_NORM
        run.optimizer.clip_grad_by_value(VALUE)
        limit = VALUE * scale_of(run)
        assert max(value.abs().max() for value in before.values()) > limit, what
        step_with(run, what, {key: value.clamp(-limit, limit) for key, value in before.items()})
        run.optimizer.zero_grad()

        run_backward(run, name)
        with pytest.raises(ValueError, match="which clips by the 2-norm"):
            run.optimizer.clip_grad_by_norm(MAX_NORM, norm_type=1.0)
        if dist.get_rank() == 1:
            next(iter(trained(run).values()))[0].grad.fill_(torch.inf)
        with pytest.raises(RuntimeError, match="they cannot be clipped"):
            run.optimizer.clip_grad_by_norm(MAX_NORM, error_if_nonfinite=True)
        if CASES[case]["precision"] == "fp16":
            assert float(run.optimizer.clip_grad_by_norm(MAX_NORM)) == torch.inf
            run.optimizer.clip_grad_by_value(VALUE)
            masters = {key: (master, master.detach().clone()) for key, (_, master) in trained(run).items()}
            run.optimizer.step()
            assert all(torch.equal(master, value) for master, value in masters.values()), what


@on(2)
def clipping_after_units_moved() -> None:
    norms = []
    for own in (True, False):
        options = dict(tp_size=2, precision="bf16")
        with training.scripted(slow(1)):
            plugin = theirs(**options) if own else ours(migrate("block", reshard_after=1), **options)
            run = train_vit(boost(plugin, None, sgd), 3)
        images, labels = training.batch(99)
        run.booster.backward(vit_loss(run.model(images), labels), run.optimizer)
        before = gradients(run)
        norms.append(float(run.optimizer.clip_grad_by_norm(MAX_NORM)))
        assert norms[-1] > 2 * MAX_NORM
        for name, gradient in gradients(run).items():
            torch.testing.assert_close(gradient, before[name] * (MAX_NORM / norms[-1]), rtol=1e-2, atol=1e-6)
    assert run.plugin.balancer.has_resharded
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


# Saved weights -------------------------------------------------------------------------------------------------------


def boost_language_model(plugin: Any, name: str, vocabulary: int, seed: int = 0) -> Trained:
    """The model ``name`` with this vocabulary, whose weights follow from ``seed``."""
    model = MODELS[name](vocab_size=vocabulary)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + seed)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    return Trained([], model, optimizer, booster, plugin)


def step(run: Trained, vocabulary: int, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(vocabulary, (SAMPLES, 12), generator=generator)
    ids[:, 0] = torch.arange(vocabulary - SAMPLES, vocabulary)
    inputs = dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    if run.plugin.pp_size > 1:
        run.booster.execute_pipeline(iter([inputs]), run.model, lambda output, _: output.loss, run.optimizer)
    else:
        run.booster.backward(run.model(**inputs).loss, run.optimizer)
    training.make_step(run.optimizer)


def check_checkpoints(
    make_plugin: Any, name: str, vocabulary: int, options: dict[str, Any], sharded: bool, folder: Path
) -> None:
    options = dict(precision="fp32") | options
    run = boost_language_model(make_plugin(**options), name, vocabulary)

    run.booster.save_model(run.model, str(folder / "initial"), shard=True)
    dist.barrier()
    saved = read_weights(folder / "initial")
    expected = MODELS[name](vocab_size=vocabulary).state_dict()
    for key in expected.keys() - {"lm_head.weight"} | (saved.keys() & {"lm_head.weight"}):
        whole = expected[key].to(saved[key].dtype)
        assert torch.equal(saved[key], whole), f"{key}: {tuple(saved[key].shape)} saved, {tuple(whole.shape)} expected"

    step(run, vocabulary, 0)
    model, optimizer = (str(folder / what) for what in ("model", "optimizer"))
    run.booster.save_model(run.model, model, shard=sharded)
    run.booster.save_optimizer(run.optimizer, optimizer, shard=sharded)
    dist.barrier()

    resumed = boost_language_model(make_plugin(**options), name, vocabulary, seed=1)
    resumed.booster.load_model(resumed.model, model)
    assert_same_parameters(resumed.parameters, run.parameters, "loaded weights")
    resumed.booster.load_optimizer(resumed.optimizer, optimizer)
    if options["precision"] == "fp32":  # a checkpoint of half-precision training has no fp32 weights
        for each in (run, resumed):
            step(each, vocabulary, 1)
        assert_same_parameters(resumed.parameters, run.parameters, "training continued from the checkpoint")


SAVED: dict[int, list[tuple[dict[str, Any], bool]]] = {
    2: [
        (dict(tp_size=2, pp_size=1), True),
        (dict(tp_size=2, pp_size=1), False),
        (dict(tp_size=1, pp_size=1), False),
        (dict(tp_size=1, **PIPELINE), True),
        (dict(tp_size=1, pp_size=1, zero_stage=1, precision="bf16"), True),
    ],
    4: [(dict(tp_size=2, **PIPELINE), True)],
}
"""By number of ranks: options, and whether checkpoints are sharded."""


@on(2)
@on(4)
def weights_of_a_padded_vocabulary_are_whole(folder: Path) -> None:
    cases = [
        (make_plugin, *model, *case)
        for make_plugin in (HeteroHybridParallelPlugin, HybridParallelPlugin)
        for model in (("gpt2", 97), ("llama", 1000))
        for number, case in enumerate(SAVED[dist.get_world_size()])
        if (make_plugin is HeteroHybridParallelPlugin and (model[0] == "gpt2" or number % 4 == 0))
        or (model[0], number) == ("llama", 0)
    ]
    for number, case in enumerate(cases):
        own_folder = folder / str(number)
        own_folder.mkdir(exist_ok=True)
        try:
            check_checkpoints(*case, own_folder)
        except BaseException as error:
            raise AssertionError(f"failed: {case}") from error


@on(2, [[[0, 1]]], [[[1, 0]]], [[[0, 1]]])
@on(3, [[[0, 1, 2]]], [[[2, 0, 1]]])
@on(4, [[[0, 1]], [[2, 3]]], [[[3, 0]], [[1, 2]]], [[[0], [2]], [[1], [3]]], [[[1, 3]], [[0, 2]]])
def several_plugins_save_the_weights_of_their_own_models(*orders: list[list[list[int]]], folder: Path) -> None:
    Randomizer.reset_index()  # ranks of an earlier pipeline have counted differently
    runs = []
    for number, order in enumerate(orders):
        stages = len(order[0])
        model = tiny_vit()
        expected = model.state_dict()
        run = boost(planned(make_plan(order, (2 // stages,) * stages, 2, 2)), model, sgd)
        runs.append(run)  # so that no group is destroyed
        for each in range(2):
            path = folder / f"order {number}-{each}"
            run.booster.save_model(run.model, str(path), shard=True)
            dist.barrier()
            torch.testing.assert_close(read_weights(path), dict(expected), rtol=0, atol=0)
