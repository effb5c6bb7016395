"""Training loops of all kinds, with any division of global batches, train as one process does on the same batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import default_collate

from tests.support import zero_runs
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import make_step, zero_plugin
from tests.support.zero_runs import SAMPLES, Numbered, assert_trained, boosted, flat, make_model, unmeasured

GLOBAL_BATCH, EPOCHS, RATE = 8, 2, 0.1
NORM = 0.05  # below the norm of all gradients
CLASSES = (1.0, 2.0, 3.0)  # weights, so that a loss is a mean over what is known only when all micro-batches are there
ALL = (0, 1, 2, 3)
WHOLE = {2: [[7], [1]], 3: [[5], [0], [3]]}  # by number of ranks: a division in which every rank has one micro-batch
PARTS = {2: [[4, 1], [1, 2]], 3: [[2, 2], [1, 0], [2, 1]]}
"""By number of ranks: a division in which every rank has two micro-batches."""

Batch = tuple[Tensor, Tensor]


class Script:
    """What a training script has after ``booster.boost``, the samples that it trains with, and numbers that it logs."""

    def __init__(
        self,
        stage: int,
        division: list[list[int]],
        size: int = GLOBAL_BATCH,
        optimizer: str = "sgd",
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        loader = dict(shuffle=True, seed=11, drop_last=drop_last)
        fixed = dict(samples=size, division=division, loader=loader, max_micro_batch=8)
        run = boosted(stage, None, optimizer, **fixed, **options)
        _, self.booster, self.model, self.optimizer, self.criterion, self.loader, self.schedule = run
        self.shares_batches = run.plugin.batches.accumulation == "shared"
        self.batches: list[list[int]] = []
        self.numbers: list[float] = []

    def epochs(self) -> Iterator[Iterator[Batch]]:
        for epoch in range(EPOCHS):
            self.loader.set_epoch(epoch)
            yield self._batches(epoch)

    def all_batches(self) -> Iterator[Batch]:
        for batches in self.epochs():
            yield from batches

    def loss(self, batch: Batch) -> Tensor:
        return self.criterion(self.model(batch[0]), batch[1])

    def backward(self, batch: Batch, factor: float = 1.0) -> None:
        self.booster.backward(self.loss(batch) * factor, self.optimizer)

    def train_with(self, batch: Batch, factor: float = 1.0) -> None:
        self.backward(batch, factor)
        self.update()

    def update(self) -> None:
        make_step(self.optimizer)

    def log(self, number: Any) -> None:
        if self.loader.is_last:
            self.numbers.append(float(number))

    def _batches(self, epoch: int) -> Iterator[Batch]:
        for inputs, targets in self.loader:
            drawn = self.loader._drawn
            self.batches.append([epoch, drawn.global_batch, *(inputs[:, 7].long().tolist() if drawn.samples else [])])
            yield inputs, targets


Loop = Callable[[Script], None]


def each(iteration: Callable[[Script, Any], Any]) -> Loop:
    def loop(script: Script) -> None:
        for batch in script.all_batches():
            iteration(script, batch)

    return loop


# Loops of other forms ------------------------------------------------------------------------------------------------


def scheduled(script: Script, norm: float = 0.0, leaves_early: bool = False) -> None:
    """With a schedule, ``zero_grad`` before the passes, a collective of its own as for logs (which all ranks must
    reach), and possibly an epoch before that was left in the middle of a global batch."""
    if leaves_early:
        script.backward(next(iter(script.loader)))
        script.optimizer.step()
        script.schedule.step()
    for batch in script.all_batches():
        script.optimizer.zero_grad()
        if script.shares_batches:
            dist.all_reduce(torch.zeros(1))
        script.backward(batch)
        if norm:
            script.optimizer.clip_grad_by_norm(norm)
        script.optimizer.step()
        script.schedule.step()
    script.numbers.append(script.optimizer.param_groups[0]["lr"])


def prefetched(script: Script) -> None:
    """Take one batch ahead, and copy and change it, as the prefetchers of NVIDIA and timm do."""
    for batches in script.epochs():
        following = None
        for inputs, targets in batches:
            following, batch = (inputs.clone().mul_(1.0).to(torch.float32), targets.clone()), following
            if batch is not None:
                script.train_with(batch)
        script.train_with(following)


def accumulated(script: Script, no_sync: bool = False) -> None:
    for number, batch in enumerate(script.all_batches(), 1):
        is_due = number % 3 == 0
        with script.booster.no_sync(script.model, script.optimizer) if no_sync and not is_due else nullcontext():
            script.backward(batch, 1 / 3)
        if is_due:
            script.update()


def only_at_the_last(script: Script, batch: Batch) -> None:
    loss = script.loss(batch)
    script.booster.backward(loss, script.optimizer)
    mean = script.loader.mean(loss)
    assert (mean is not None) == script.loader.is_last
    if script.loader.is_last:
        script.log(mean)
        script.update()


def every_third_global_batch(script: Script) -> None:
    number = 0
    for batch in script.all_batches():
        script.backward(batch, 1 / 3)
        number += script.loader.is_last
        if script.loader.is_last and number % 3 == 0:
            script.update()


def evaluation_mode(script: Script) -> None:
    script.model.eval()
    for batch in script.all_batches():
        script.train_with(batch)
        script.model.eval()
        with torch.no_grad():
            script.model(torch.zeros(2, 8))


def two_passes(script: Script, batch: Batch) -> None:
    loss = script.loss(batch)
    script.optimizer.backward(loss * 0.25, retain_graph=True)
    script.optimizer.backward(loss * 0.75)
    script.update()


def two_forwards_first(script: Script, batch: Batch) -> None:
    for loss in [script.loss(batch) * share for share in (0.5, 0.3, 0.2)]:
        script.booster.backward(loss, script.optimizer)
    script.update()


def parts_of_two_outputs(script: Script, batch: Batch) -> None:
    losses = cross_entropy(script.model(batch[0]), batch[1], reduction="none")
    script.optimizer.backward(losses[::2].sum() / len(losses), retain_graph=True)
    script.optimizer.backward(losses[1::2].sum() / len(losses), retain_graph=True)
    script.optimizer.backward(losses.mean() * 0.0)
    script.update()


# Loops that use gradients before the step ----------------------------------------------------------------------------


def own_zero_grad(script: Script, batch: Batch) -> None:
    loss = script.loss(batch)
    for parameter in script.model.parameters():
        parameter.grad = None
    script.booster.backward(loss, script.optimizer)
    script.optimizer.step()


def between(use: Callable[[Script], Any]) -> Loop:
    def iteration(script: Script, batch: Batch) -> None:
        script.backward(batch)
        use(script)
        script.update()

    return each(iteration)


def clip_by_norm(script: Script) -> None:
    script.log(script.optimizer.clip_grad_by_norm(NORM))


def clip_by_both(script: Script) -> None:
    script.optimizer.clip_grad_by_norm(2 * NORM)
    clip_by_norm(script)
    script.optimizer.clip_grad_by_value(NORM / 4)


def clip_at_the_second_step(script: Script) -> None:
    if script.loader.current.global_batch == 1:
        script.optimizer.clip_grad_by_norm(NORM)


def clip_by_torch(script: Script) -> None:
    if script.loader.is_last:
        script.log(clip_grad_norm_(script.model.parameters(), NORM))


def mask(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(gradient.numel()).view_as(gradient) % 3 > 0)


mask.is_linear = True  # type: ignore[attr-defined]


def masked(script: Script, batch: Batch) -> None:
    for parameter in script.model.parameters():
        if not parameter._backward_hooks:
            parameter.register_hook(mask)
    script.train_with(batch)


def count(batch: Any) -> Tensor:
    return torch.tensor(CLASSES)[batch[1]].sum()


def counted(script: Script) -> None:
    script.criterion = nn.CrossEntropyLoss(torch.tensor(CLASSES))
    between(clip_by_norm)(script)


class Exact(NamedTuple):
    loop: Loop
    stages: tuple[int, ...] = ALL
    per_step: int = 1  # global batches of a step
    counts_batches: bool = False  # the loop counts the batches of the loader, so that each must be a global batch


EXACT = {
    "usual": Exact(each(Script.train_with)),
    "prefetched": Exact(prefetched),
    "mean": Exact(each(only_at_the_last)),
    "every third": Exact(every_third_global_batch, per_step=3),
    "accumulated": Exact(accumulated, per_step=3, counts_batches=True),
    "no_sync": Exact(partial(accumulated, no_sync=True), per_step=3, counts_batches=True),
    # Forward and backward twice per batch, each for a part of the loss.
    "two losses": Exact(each(lambda script, batch: [script.backward(batch, 0.25), script.train_with(batch, 0.75)])),
    "evaluation mode": Exact(evaluation_mode),
    "two passes": Exact(each(two_passes), (0, 1, 2)),
    "two forward passes": Exact(each(two_forwards_first), (0, 1, 2)),
    "parts": Exact(each(parts_of_two_outputs), (0, 1, 2)),
    "zero_grad of the module": Exact(
        each(lambda s, batch: [s.backward(batch), s.optimizer.step(), s.model.zero_grad()])
    ),
    "zero_grad before": Exact(
        each(lambda s, batch: [s.model.module.zero_grad(), s.backward(batch), s.optimizer.step()])
    ),
    "own zero_grad": Exact(each(own_zero_grad)),
    "norm": Exact(between(clip_by_norm)),
    "both": Exact(between(clip_by_both)),
    "second": Exact(between(clip_at_the_second_step)),
    "torch": Exact(between(clip_by_torch), (0,)),
    "mask": Exact(each(masked), (0, 1, 2)),
    "counted": Exact(counted),
}
SCHEDULED = {  # also with the last global batch of an epoch, which is smaller
    "scheduled": scheduled,
    "clipped, scheduled": partial(scheduled, norm=4 * NORM),
    "left early": partial(scheduled, leaves_early=True),
}
OPTIONS: dict[str, dict[str, Any]] = {"counted": dict(weight_by=count), "counted, torch": dict(weight_by=count)}
"""Arguments of the plugin, by name of a case."""


class Run(NamedTuple):
    loop: str
    stage: int
    division: list[list[int]]
    size: int = GLOBAL_BATCH
    optimizer: str = "sgd"
    options: dict[str, Any] | None = None
    max_norm: float = 0.0  # that of one process, in loops with a schedule
    rtol: float = 1e-5
    atol: float = 1e-6


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def some(stages: tuple[int, ...], name: str, ranks: int = 2) -> list[int]:
    """One of the stages 1 and 2, which have one kind of optimizer, and the others; with ``thorough`` all."""
    left_out = () if IS_THOROUGH or len(stages) < 3 else (1 + len(name) % 2,)
    chosen = [stage for stage in stages if stage not in left_out]
    return chosen if IS_THOROUGH or ranks == 2 else chosen[1:2]


DIVISIONS: dict[int, list[tuple[int, list[list[int]]]]] = {
    2: [
        *((8, [[7], [1]]), (8, [[1], [7]]), (5, [[5], [0]]), (5, [[0], [5]])),
        *((11, [[4, 3], [2, 2]]), (8, [[3, 2, 1], [1, 1, 0]])),
    ],
    3: [(8, [[5], [1], [2]]), (11, [[2, 1], [3, 0], [1, 4]])],
    4: [(11, [[1], [4], [0], [6]])],
}
"""By number of ranks: samples of a global batch, and sizes of the micro-batches of each rank."""
ADAMW = dict(rtol=1e-3, atol=1e-4)  # divides by numbers that may be near 0, which amplifies rounding errors
HALF = dict(rtol=0.05, atol=0.02)  # 8 bits of precision in each of the six steps
USUAL = Run("scheduled", 1, [[4, 3], [2, 2]], 11, rtol=1e-4)


def runs_on(ranks: int) -> Iterator[Run]:
    """Without ``thorough``, each division at two stages, or at one on four ranks."""
    for number, (size, division) in enumerate(DIVISIONS[ranks]):
        for stage in ALL:
            if IS_THOROUGH or (stage - number) % (2 if ranks < 4 else 4) == 0:
                yield USUAL._replace(stage=stage, size=size, division=division)
    for name, exact in EXACT.items() if ranks < 4 else ():
        divisions = (WHOLE,) if exact.counts_batches else (PARTS, WHOLE)[: 2 if IS_THOROUGH or name == "usual" else 1]
        for stage in some(exact.stages, name, ranks):
            yield from (Run(name, stage, division[ranks], options=OPTIONS.get(name)) for division in divisions)
    if ranks > 2:
        return
    more: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (ALL, dict(optimizer="adamw", **ADAMW)),
        ((0, 2), dict(options={"max_norm": 4 * NORM}, max_norm=4 * NORM)),
        ((1, 3), dict(options={"max_norm": 4 * NORM}, max_norm=4 * NORM, optimizer="adamw", **ADAMW)),
        (ALL, dict(loop="clipped, scheduled", max_norm=4 * NORM)),
        (ALL, dict(options={"precision": "bf16"}, **HALF)),
        ((1, 2), dict(options={"precision": "fp16", "initial_scale": 2**8}, **HALF)),
        (ALL, dict(loop="left early", division=[[3, 2], [1, 2]], size=8)),
        # Each rank has its own number of micro-batches.
        ((0,), dict(division=[[2, 2, 2, 1], [1]], size=8, options={"accumulation": "per_rank"})),
        ((1,), dict(division=[[1], [2, 2, 2, 1]], size=8, options={"accumulation": "per_rank"})),
    ]
    for stages, changes in more:
        yield from (USUAL._replace(stage=stage, **changes) for stage in stages)


def train(run: Run) -> tuple[list[list[int]], Tensor, list[float]]:
    has_schedule = run.loop in SCHEDULED
    more = dict(schedule=make_schedule, drop_last=False) if has_schedule else {}
    script = Script(run.stage, run.division, run.size, run.optimizer, **more, **(run.options or {}))
    try:
        (SCHEDULED[run.loop] if has_schedule else EXACT[run.loop].loop)(script)
    except Exception as error:
        raise AssertionError(str(run)) from error
    return script.batches, flat(script.model), script.numbers


def train_alone(run: Run, batches: list[list[int]]) -> tuple[Tensor, list[float]]:
    """Train one process on these global batches. Returns the parameters, and the numbers that the loop logs."""
    data, model, name, numbers = Numbered(), make_model(), run.loop, list[float]()
    optimizer = zero_runs.make_optimizer(model, run.optimizer)
    if name in SCHEDULED:
        collated = [default_collate([data[index] for index in batch]) for batch in batches]
        fitted = zero_runs.fit(model, optimizer, collated, max_norm=run.max_norm, schedule=make_schedule(optimizer))
        return fitted, [optimizer.param_groups[0]["lr"]]
    for number, batch in enumerate(batches, 1):
        inputs, targets = default_collate([data[index] for index in batch])
        loss = cross_entropy(model(inputs), targets, torch.tensor(CLASSES) if name == "counted" else None)
        (loss / EXACT[name].per_step).backward()
        if name == "mean":
            numbers.append(loss.item())
        if number % EXACT[name].per_step:
            continue
        if name == "both":
            clip_grad_norm_(model.parameters(), 2 * NORM)
        if name in ("norm", "torch", "both", "counted") or (name == "second" and number % 3 == 2):
            norm = float(clip_grad_norm_(model.parameters(), NORM))
            numbers += [] if name == "second" else [norm]
        if name == "both":
            clip_grad_value_(model.parameters(), NORM / 4)
        for parameter in model.parameters() if name == "mask" else ():
            parameter.grad = mask(parameter.grad)
        make_step(optimizer)
    return flat(model), numbers


def check(run: Run, results: Sequence[Any]) -> None:
    """Every sample was used once per epoch, and the ranks trained as one process does on the same global batches."""
    together: dict[tuple[int, int], list[int]] = {}
    for batches, _, _ in results:
        for epoch, index, *ids in batches:
            together.setdefault((epoch, index), []).extend(ids)
    every = [together[key] for key in sorted(together)]
    rest = [SAMPLES % run.size] if run.loop in SCHEDULED else []
    assert [len(batch) for batch in every] == ([run.size] * (SAMPLES // run.size) + rest) * EPOCHS, run
    for epoch in range(EPOCHS):
        seen = [index for (of, _), ids in together.items() if of == epoch for index in ids]
        assert len(set(seen)) == len(seen), run
    expected, logged = train_alone(run, every)
    assert_trained([[parameters] for _, parameters, _ in results], [run], expected, run.rtol, run.atol)
    for *_, numbers in results:
        assert numbers == pytest.approx(logged, rel=1e-5), run


@on(2)
@on(3)
@on(4)
@unmeasured
def loops_train_as_one_process_does() -> None:
    for run in runs_on(dist.get_world_size()):
        results = of_all_ranks(train(run))
        if dist.get_rank() == 0:  # on one core, the others would take as long again
            check(run, results)


@on(2)
def training_after_measuring_equals_that_of_one_process() -> None:
    check(USUAL, of_all_ranks(train(USUAL)))


@on(2)
@unmeasured
def if_loss_scaling_overflows_all_ranks_skip_the_step() -> None:
    scale = {"initial_scale": 2.0**40, "max_scale": 2.0**40, "hysteresis": 1, "backoff_factor": 0.5}
    (_, one, _), (_, other, _) = of_all_ranks(train(USUAL._replace(options={"precision": "fp16", **scale})))
    assert one.isfinite().all() and torch.equal(one, other)


# Two models of one loop ----------------------------------------------------------------------------------------------


def two_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8)), nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))


def adversarial(models: Any, optimizers: Any, batches: Any) -> list[Tensor]:
    (generator, discriminator), (first, second) = models, optimizers
    for inputs, _ in batches:
        made = generator(inputs)
        make_step(second, softplus(discriminator(made.detach()) - discriminator(inputs)).mean())
        discriminator.requires_grad_(False)
        make_step(first, softplus(-discriminator(made)).mean())
        discriminator.requires_grad_(True)
    return [flat(each) for each in models]


def mean_square(model: nn.Module, _: Any, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


@on(2)
@if_thorough(3)
@unmeasured
def two_models_train_on_the_batches_of_one_loader() -> None:
    def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=RATE)

    alone, ranks = two_models(), dist.get_world_size()
    batches = zero_runs.global_batches(Numbered(24), 8)
    expected = adversarial(alone, [plain_sgd(model) for model in alone], batches)
    for stage in (0, 1, 2):
        for division in (WHOLE[ranks], PARTS[ranks])[: 2 if IS_THOROUGH or stage == 1 else 1]:
            plugin = zero_plugin(stage, GLOBAL_BATCH, max_micro_batch=8, weight_by="samples", training_step=mean_square)
            booster, loader = Booster(plugin=plugin), plugin.prepare_dataloader(Numbered(24))
            models, optimizers = list(two_models()), []
            for number, model in enumerate(models):
                models[number], optimizer, _, loader, _ = booster.boost(model, plain_sgd(model), None, loader)
                optimizers.append(optimizer)
            loader.divide_by(lambda samples, division=division: zero_runs.sizes_by_rank(division, samples))
            if division == PARTS[ranks]:
                with pytest.raises(RuntimeError, match="is passed forward again after"):
                    adversarial(models, optimizers, loader)
            else:
                case = f"stage {stage}, {division}"
                assert_trained([adversarial(models, optimizers, loader)], [case, case], expected, 1e-5)
