"""Training is that of Colossal-AI's plugin whatever a loop does while units or columns migrate, and move for good, with
each feature of the plugin, and while plans change."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import Randomizer
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from timm.layers import set_reentrant_ckpt
from torch import Tensor, nn

from colossal_hetero.balance import BalancePlan, pruning
from colossal_hetero.layers import hetero_layers
from tests.support import migration_runs
from tests.support.checks import on
from tests.support.migration_runs import ITERATIONS, METHODS, assert_equal, methods_for, migrating_run, reference_run
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import Trained, batch, loss_of, tiny_vit, train

STEPS = 3
PIPELINE = dict(pp_size=2, num_microbatches=3)


def forward(run: Trained, number: int, size: int = 6) -> Tensor:
    images, labels = batch(number, size=size)
    loss = loss_of(run.model(images), labels)
    run.losses.append(loss.item())
    return loss


def backward(run: Trained, number: int, size: int = 6) -> None:
    run.booster.backward(forward(run, number, size), run.optimizer)


def gradients(run: Trained) -> list[tuple[nn.Parameter, Tensor]]:
    return [(each, each.grad) for each in run.model.parameters() if each.grad is not None]


def shorter_windows(clip: Callable[[Any], Any], run: Trained) -> None:
    for step, passes in enumerate((2, 3, 1)):
        for micro in range(passes):
            backward(run, 10 * step + micro)
        clip(run)
        run.finish()


def is_sharded(parameter: nn.Parameter) -> bool:
    return is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter)


def clip_by_norm(run: Trained) -> None:
    """By the norm of all shards, as code for tensor parallelism does it."""
    trained = [(gradient, is_sharded(each)) for each, gradient in gradients(run)]
    shards, replicated = (
        torch.stack([gradient.square().sum() for gradient, is_shard in trained if is_shard == wanted]).sum()
        for wanted in (True, False)
    )
    dist.all_reduce(shards)
    for gradient, _ in trained:
        gradient.mul_((0.05 / (shards + replicated).sqrt()).clamp(max=1))


def sharpness_aware(no_sync: bool, run: Trained) -> None:
    """With ``no_sync`` as with data parallelism: the first pass is not summed, and weights change past their version
    counters."""
    for step in range(STEPS):
        with run.booster.no_sync(run.model, run.optimizer) if no_sync else contextlib.nullcontext():
            backward(run, step)
        before = [(each, each.detach().clone(), gradient.clone()) for each, gradient in gradients(run)]
        with torch.no_grad():
            for each, _, gradient in before:
                (each.data if no_sync else each).add_(0.01 * torch.tanh(100 * gradient))
        run.model.zero_grad()
        backward(run, step)
        with torch.no_grad():
            for each, value, _ in before:
                (each.data if no_sync else each).copy_(value)
        run.finish()


def unequal_windows(run: Trained) -> None:
    for step in range(STEPS):
        for micro in range(1 + step % 2):
            backward(run, 2 * step + micro)
        run.finish()


def seen_by_hooks(run: Trained) -> None:
    for each in run.model.parameters():
        each.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    each = next(reversed(list(run.model.unwrap().blocks[0].mlp.parameters())))
    each.register_post_accumulate_grad_hook(lambda parameter: run.losses.append(float(parameter.grad.norm())))
    unequal_windows(run)


def steps_in_the_backward_pass(run: Trained) -> None:
    def update(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.05)
        parameter.grad = None

    for each in run.model.parameters():
        each.register_post_accumulate_grad_hook(update)
    unequal_windows(run)


def other_weights_before_backward(run: Trained) -> None:
    """Between the forward and the backward pass of a loss, other weights pass through the model: those of a teacher,
    without gradients, and changed ones of the student, forward and backward."""
    parameters = list(run.model.parameters())
    average = [each.detach().clone() for each in parameters]
    for step in range(STEPS):
        loss = forward(run, step)
        own = [each.detach().clone() for each in parameters]
        for each, mean in zip(parameters, average, strict=True):
            each.data.copy_(mean)
        with torch.no_grad():
            forward(run, 50 + step)
        for each, value, mean in zip(parameters, own, average, strict=True):
            each.data.copy_(value).add_(mean, alpha=0.1)
        backward(run, 70 + step)
        for each, value, mean in zip(parameters, own, average, strict=True):
            each.data.copy_(value)
            mean.lerp_(value, 0.2)
        run.booster.backward(loss, run.optimizer)
        run.finish()


def gradients_without_backward(run: Trained) -> None:
    """``torch.autograd.grad``, as in penalties of first order and in the surgery of gradients."""
    for step in range(STEPS):
        parameters = [each for each in run.model.parameters() if each.requires_grad]
        found = torch.autograd.grad(forward(run, step), parameters)
        backward(run, 30 + step)
        for each, gradient in zip(parameters, found, strict=True):
            each.grad.add_(gradient, alpha=0.5)
        run.finish()


def frozen_weights_that_change(run: Trained) -> None:
    frozen = run.model.unwrap().blocks[0]
    train(run, 2)
    for parameter in frozen.parameters():
        parameter.data.mul_(1.1)
    train(run, 2)
    frozen.requires_grad_(True)
    train(run, 2)


def discarded_gradients(run: Trained) -> None:
    train(run, 1)
    with run.booster.no_sync(run.model, run.optimizer):
        backward(run, 40)
    run.optimizer.zero_grad()
    train(run, 2, accumulation=2)


def _fail(*_: Any) -> None:
    raise ArithmeticError("a failure in the user's code")


def failures(run: Trained) -> None:
    block = run.model.unwrap().blocks[0]
    for iteration in range(ITERATIONS):
        for micro in range(4):
            place = (block, block.mlp.act)[iteration % 2]
            failing: Any = contextlib.nullcontext()
            if micro == 1:
                failing = place.register_forward_pre_hook(_fail)
            elif micro == 3:
                failing = block.register_full_backward_pre_hook(_fail)
            with failing, contextlib.suppress(ArithmeticError), run.booster.no_sync(run.model, run.optimizer):
                loss = forward(run, 3 * iteration + micro)
                if micro in (0, 3):
                    loss.backward()
        # What was accumulated is discarded, because a part of it may be missing.
        run.optimizer.zero_grad()
        train(run, 1, accumulation=2, same_batch=True)


def unused_passes(run: Trained) -> None:
    for iteration in range(ITERATIONS):
        few, more = (iteration, 3 + iteration), (50 + iteration, 8 - iteration)
        with torch.no_grad():
            forward(run, *few)  # in train mode
        run.booster.backward(forward(run, *few) + forward(run, *more), run.optimizer)
        run.model.eval()
        with torch.no_grad():
            forward(run, *more)
        forward(run, *few)
        run.model.train()
        forward(run, *more)  # a forward pass without a backward pass
        run.finish()


def blocks_left_out(run: Trained) -> None:
    block = run.model.unwrap().blocks[0]
    for step in range(STEPS):
        if step == 1:
            block.forward = nn.Identity().forward
        backward(run, step)
        run.finish()
        vars(block).pop("forward", None)


def the_model_inside(run: Trained) -> None:
    inner = run.model.unwrap()
    for iteration in range(ITERATIONS):
        images, labels = batch(iteration)
        run.model.eval()
        inner.train()
        loss = loss_of((inner if iteration % 2 else run.model)(images), labels)
        run.losses.append(loss.item())
        run.booster.backward(loss, run.optimizer)
        run.finish()


def checkpointed(reentrant: bool = False, depth: int = 1) -> nn.Module:
    model = tiny_vit(depth=depth)
    set_reentrant_ckpt(reentrant)
    model.set_grad_checkpointing()
    return model


def only(trained: str, others: bool = False) -> nn.Module:
    model = tiny_vit()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((trained in name) != others)
    return model


plainly = partial(train, iterations=ITERATIONS)
accumulated = partial(train, iterations=ITERATIONS, accumulation=2)


@dataclass(frozen=True)
class Case:
    train: Callable[[Trained], Any] = plainly
    options: dict[str, Any] = field(default_factory=dict)
    """Of the plugin, besides two ranks of tensor parallelism, or three."""
    model: Callable[[], nn.Module | None] = lambda: None  # None: that of :func:`migrating_run`
    columns: bool = False  # whether it is checked in column form too
    for_good: bool | None = False
    """Whether units can be permanently re-sharded: if the loop keeps no tensor of a parameter's shape from one step to
    the next. None: this is tried, and hooks prevent it."""
    sender: int | None = None  # the global rank that gives work away; None: another one in each case
    methods: tuple[str, ...] | None = None  # with dropout in blocks, units do not draw Colossal-AI's masks


CASES: dict[str, Case] = {
    "clipping by norm": Case(partial(shorter_windows, clip_by_norm), for_good=True),
    "clipping by the optimizer": Case(
        partial(shorter_windows, lambda run: run.optimizer.clip_grad_by_norm(0.05)), for_good=True
    ),
    "sharpness-aware": Case(partial(sharpness_aware, False), columns=True),
    "sharpness-aware under no_sync": Case(partial(sharpness_aware, True), for_good=True),
    "hooks": Case(seen_by_hooks, for_good=None),
    "steps in the backward pass": Case(steps_in_the_backward_pass),
    "autograd.grad": Case(gradients_without_backward, for_good=True),
    "other weights before backward": Case(other_weights_before_backward),
    "frozen weights that change": Case(frozen_weights_that_change, model=partial(only, "blocks.0", others=True)),
    "discarded gradients": Case(discarded_gradients, columns=True),
    "failures": Case(failures, columns=True),
    "unused passes": Case(unused_passes, columns=True),
    "blocks left out": Case(blocks_left_out, dict(find_unused_parameters=True)),
    "the model inside": Case(the_model_inside, columns=True),
    "accumulated, clipped": Case(accumulated, dict(max_norm=0.05), columns=True),
    "checkpointed": Case(accumulated, model=checkpointed),
    "checkpointed, reentrant": Case(model=partial(checkpointed, True)),
    "dropout outside of blocks": Case(model=partial(tiny_vit, pos_drop_rate=0.2, drop_path_rate=0.3), columns=True),
    "dropout in attention": Case(model=partial(tiny_vit, depth=1, attn_drop_rate=0.2), methods=METHODS[1:2]),
    "dropout in MLPs": Case(model=partial(tiny_vit, depth=1, proj_drop_rate=0.2), methods=METHODS[2:]),
    "biases only": Case(model=partial(only, "bias"), columns=True),
    "second block only": Case(model=partial(only, "blocks.1")),
    "attention's weights only": Case(model=partial(only, "qkv.weight")),
}
OF_FOUR_RANKS: dict[str, Case] = {
    "dp=2": Case(accumulated, columns=True, sender=3),
    "dp=2, dp inside": Case(options=dict(dp_outside=False), sender=1),
    "pp=2, first stage": Case(accumulated, PIPELINE, sender=1),
    "pp=2, last stage, checkpointed": Case(
        options=PIPELINE, model=partial(checkpointed, depth=2), columns=True, sender=3
    ),
    "pp=2, interleaved": Case(
        options=dict(pp_size=2, num_microbatches=2, pp_style="interleaved", num_model_chunks=2),
        model=partial(tiny_vit, depth=4),
        sender=3,
    ),
}
ON_THREE_RANKS = ("clipping by norm", "sharpness-aware", "autograd.grad")


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    Randomizer._INDEX = 0
    torch.manual_seed(11)
    yield


def trained(case: Case, what: str, sender: int, method: str | None, choices: Any = None, **options: Any) -> Trained:
    with seeded():
        if method is None:
            run = reference_run(case.model(), **options)
            case.train(run)
            return run
        run = migrating_run(method, sender, case.model(), choices=choices, **options)
        case.train(run)
    group, balancer = dist.get_process_group_ranks(run.plugin.tp_group), run.plugin.balancer
    assert [share > 0.1 for share in balancer.plan.migrate] == [rank == sender for rank in group], what
    assert any(sent.messages for sent in balancer.traffic.sent.values()) == (sender in group), what
    if method == "block":
        assert all(layer.block is not None for layer in hetero_layers(run.model).values()), what
    return run


@on(2)
@on(3)
@on(4)
def any_loop_trains_with_each_feature_as_without_migration() -> None:
    world = dist.get_world_size()
    for number, (name, case) in enumerate((OF_FOUR_RANKS if world == 4 else CASES).items()):
        if world == 3 and name not in ON_THREE_RANKS and not IS_THOROUGH:
            continue
        options = dict(tp_size=2 if world == 4 else world) | case.options
        expected = trained(case, name, 0, None, **options)
        for sender in range(world) if IS_THOROUGH else (number % world if case.sender is None else case.sender,):
            methods = case.methods or (methods_for(number) if case.columns else METHODS[:1])
            for method in methods:
                what = f"{name}, {method}, sender {sender}"
                assert_equal(trained(case, what, sender, method, **options), expected, what)
            if case.for_good is False:
                continue
            run = trained(case, name, sender, "block", dict(reshard_after=1), **options)
            assert run.plugin.balancer.has_resharded == (case.for_good is True), name
            with run.plugin.balancer.ordinary_shards():
                assert_equal(run, expected, f"{name}, sender {sender}, for good")


SCALED = dict(precision="fp16", initial_scale=2**8)
three, three_of_two = partial(train, iterations=3), partial(train, iterations=3, accumulation=2)
HALF: dict[int, dict[str, Case]] = {
    2: {
        "bf16, clipped": Case(three_of_two, dict(precision="bf16", max_norm=0.5), sender=0),
        "fp16": Case(three, SCALED, sender=1),
    },
    4: {
        "ZeRO 1, gathered late": Case(
            three_of_two, dict(precision="bf16", zero_stage=1, overlap_allgather=True), sender=1
        ),
        "ZeRO 2, fp16": Case(three, SCALED | dict(zero_stage=2), sender=3),
        "pipeline": Case(three, PIPELINE | dict(precision="bf16"), sender=3),
    },
}


@on(2)
@on(4)
def migration_in_half_precision_is_as_close_to_fp32_as_training_without_it() -> None:
    for number, (name, case) in enumerate(HALF[dist.get_world_size()].items()):
        of_half = ("zero_stage", "overlap_allgather", "initial_scale", "precision")
        whole = {key: value for key, value in case.options.items() if key not in of_half} | dict(tp_size=2)
        start = reference_run(case.model(), **whole).parameters
        exact = trained(case, name, 0, None, **whole).parameters
        errors = []
        for method in (None, *(METHODS[:2] if IS_THOROUGH or number == 0 else METHODS[:1])):
            run = trained(case, f"{name}, {method}", case.sender or 0, method, tp_size=2, **case.options)
            run.model._force_wait_all_gather()
            errors.append(
                sum(float((value.float() - exact[key]).square().sum()) for key, value in run.parameters.items())
            )
        # Relative to the change of the parameters; another order of summation has other, but no larger errors.
        moved = sum(float((exact[key] - start[key]).square().sum()) for key in exact)
        plain, *migrated = (math.sqrt(error / moved) for error in errors)
        assert all(error <= 1.1 * plain < 0.1 for error in migrated), f"{name}: {plain}, {migrated}"


class Chosen:
    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: Tensor, weight: Tensor, count: int) -> Tensor:
        return torch.arange(count)

    def end_interval(self, weight: Tensor) -> None: ...


def _pruned_columns(run: Trained) -> dict[str, tuple[int, int]]:
    """The contraction columns ``[start, stop)`` that this rank prunes, by layer."""
    found = {}
    for name, layer in hetero_layers(run.model.unwrap()).items():
        if layer.block is None:
            columns = layer.contraction_columns
            given = layer._migration.given
            found[name] = (max(1, layer.workload.kept_count(columns) - given), columns - given)
        elif layer.block.output is layer:
            workload, size = layer.block.workload, layer.block.places[-1][0].size
            found[name] = (workload.kept * size, (layer.block.units - workload.given) * size)
    assert any(start < stop for start, stop in found.values()), "nothing is pruned"
    return found


def _train_without(run: Trained, left_out: dict[str, tuple[int, int]]) -> Trained:
    """Train with Colossal-AI's plugin, with these columns set to zero in forward and backward."""
    weights = {name: module.weight for name, module in run.model.unwrap().named_modules() if name in left_out}
    assert len(weights) == len(left_out)
    for iteration in range(ITERATIONS):
        kept = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, (start, stop) in left_out.items():
            weights[name].data[:, start:stop] = 0
        backward(run, iteration)
        for name, (start, stop) in left_out.items():
            weights[name].data.copy_(kept[name])
            weights[name].grad[:, start:stop] = 0
        run.finish()
    return run


@on(2)
def a_rank_that_prunes_and_migrates_trains_the_remaining_columns_exactly() -> None:
    """In block form that is the model without the pruned units, also if nothing migrates."""
    for sender, method, given in (
        (0, "block", 0.3),
        (1, "block", 0.3),
        (1, "block", 0.0),
        (1, "broadcast-reduce", 0.3),
    ):
        with patch.object(pruning, "make_selector", Chosen):
            run = migrating_run(method, (), choices=dict(mode="semi"), tp_size=2)
            order = slice(None, None, 1 - 2 * sender)
            run.plugin.balancer.follow(BalancePlan((0.3, 0.0)[order], (given, 0.0)[order], (0.0, given)[order]))
            left_out = _pruned_columns(run) if dist.get_rank() == sender else {}
            train(run, ITERATIONS)
        assert_equal(run, _train_without(reference_run(tp_size=2), left_out), f"{method}, {sender}, {given}")


def evaluate(run: Trained, seen: list[Tensor]) -> None:
    """Append the logits of the model, and of a model with averaged weights, as they are stored by many averages: past
    the version counters of the parameters."""
    parameters = list(run.model.parameters())
    trained = [parameter.detach().clone() for parameter in parameters]
    for factor in (1.0, 0.5):
        for parameter, value in zip(parameters, trained, strict=True):
            parameter.data.copy_(factor * value)
        run.model.eval()
        with torch.no_grad():
            # A part of the model, as in the extraction of features, computes each rank's own units.
            for model in (run.model, run.model.unwrap().forward_features):
                seen += [model(batch(number)[0]) for number in (98, 99)]
    for parameter, value in zip(parameters, trained, strict=True):
        parameter.data.copy_(value)
    run.model.train()


def train_and_evaluate(run: Trained, seen: list[Tensor]) -> Trained:
    for iteration in range(ITERATIONS):
        for micro in range(2):
            loss = forward(run, 2 * iteration + micro)
            if iteration == ITERATIONS - 1:
                run.model.eval()
                with torch.inference_mode():
                    seen.append(run.model(batch(97)[0]).clone())
                run.model.train()
            run.booster.backward(loss, run.optimizer)
            if iteration % 2:
                evaluate(run, seen)
        run.finish()
        evaluate(run, seen)
    return run


@on(2, 2)
@on(3, 3)
def evaluation_while_units_migrate_gives_the_logits_of_the_unbalanced_model(world: int) -> None:
    expected: list[Tensor] = []
    plain = train_and_evaluate(reference_run(tp_size=world), expected)
    for method in methods_for(1) if world == 2 else ("block",):
        seen: list[Tensor] = []
        run = train_and_evaluate(migrating_run(method, world - 1, tp_size=world), seen)
        balancer = run.plugin.balancer
        assert sum(balancer.plan.migrate) > 0.1, method
        assert_equal(run, plain, method)
        for number, (actual, wanted) in enumerate(zip(seen, expected, strict=True)):
            off = float((actual - wanted).abs().max() / wanted.abs().max())
            assert off <= 2e-5, f"{method}, evaluation {number}: {off}"
        records = balancer.collect()
        assert records is None or [record.iteration for record in records] == list(range(ITERATIONS))


def hook_gradients(run: Trained, ranks: Sequence[int]) -> Trained:
    if dist.get_rank() in ranks:
        for each in filter(is_sharded, run.model.parameters()):
            each.register_hook(lambda gradient: gradient.clamp(-0.002, 0.002))
    return run


@on(4)
def hooks_in_a_pipeline_see_each_micro_batch() -> None:
    everywhere, first, options = (0, 1, 2, 3), (0,), dict(tp_size=2) | PIPELINE
    for ranks, sender in ((everywhere, 0), (first, 1)):
        expected = train(hook_gradients(reference_run(**options), ranks), STEPS)
        # The ranks 0 and 1 share the layers of the first stage, 2 and 3 those of the second one.
        run = hook_gradients(migrating_run("block", (), **options), ranks)
        migration_runs.give(run.plugin, (sender, 2 + sender))
        train(run, STEPS)
        assert run.plugin.balancer.plan.migrate[sender] > 0.1
        assert_equal(run, expected, f"hooks on {ranks}, sender {sender}")
    # Also hooks that are registered while units migrate.
    late = [migrating_run("block", 1, **options), reference_run(**options)]
    for run in late:
        train(hook_gradients(train(run, 1), first), 1)
    assert_equal(*late, "late hooks")


@on(4)
def blocks_that_are_left_out_of_some_micro_batches_of_a_pipeline() -> None:
    options = dict(tp_size=2) | PIPELINE
    runs = [migrating_run("block", (0, 2), **options), reference_run(**options)]
    for run in runs:
        block = run.model.unwrap().blocks[run.plugin.stage_manager.stage]
        whole, passes = block.forward, count()
        block.forward = lambda x, whole=whole, passes=passes: x * 1.0 if next(passes) % 3 == 1 else whole(x)
        train(run, STEPS)
    assert runs[0].plugin.balancer.plan.migrate[0] > 0.1
    assert_equal(*runs, "left out")
