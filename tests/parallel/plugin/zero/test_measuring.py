"""Before training: what measuring does to models, losses and files, and which ZeRO stage and batches follow from it. In
training: what is measured, and global batches that are divided again."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPModel
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.functional import cross_entropy

from colossal_hetero.colossalai_support import accelerator
from colossal_hetero.data_parallel import attach, busy_timer
from colossal_hetero.data_parallel.busy_timer import BusyTimer, TimedGlobalBatch
from tests.support import zero_runs
from tests.support.checks import of_all_ranks, on
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import make_step
from tests.support.zero_runs import SAMPLES, Net, Numbered, assert_trained, boosted, fit, flat, make_model, unmeasured

ZERO = (0, 1, 2, 3)
PLUGINS = (*ZERO, "hybrid")
KINDS = (1, 3, "hybrid")  # those that differ in how losses are checked and files are kept
DROP_LAST = dict(drop_last=True)


@on(2)
def models_in_evaluation_mode_can_be_boosted() -> None:
    """``from_pretrained`` of transformers returns models in evaluation mode."""
    alone, trained = make_model(), []
    expected = fit(alone, zero_runs.make_optimizer(alone, "sgd"), zero_runs.global_batches(Numbered(), 8))
    for kind in PLUGINS:
        modes: list[bool] = []
        model = make_model().eval()
        model.norm.train()  # modes of parts are restored, too
        handle = model.second.register_forward_hook(lambda module, *_, modes=modes: modes.append(module.training))
        run = boosted(kind, model, division=[[5], [3]])
        handle.remove()
        assert any(modes), kind
        assert [module.training for module in model.modules()] == [False, False, True, False], kind
        run.model.train()
        trained.append(run.fit())
    assert_trained([trained], PLUGINS, expected)


@on(2)
def the_check_of_the_loss_does_not_compile() -> None:
    for in_place in (False, True):
        modes: list[bool] = []
        model = make_model()

        def backend(graph: Any, inputs: Any, modes: list[bool] = modes) -> Any:
            modes.append(torch.is_grad_enabled())
            return graph.forward

        if in_place:
            model.compile(backend=backend)
        else:
            model = torch.compile(model, backend=backend)  # type: ignore[assignment]
        boosted(1, model)
        assert modes and all(modes), in_place  # the check of the loss, without gradients, compiles nothing


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(inputs[:, :7]))))


@on(2, [[0], [8]])
@on(2, [[3, 0], [2, 3]])
@on(3, [[4], [0], [4]])
def batch_normalization_of_single_values_trains_with_two_samples_or_more(division: list[list[int]]) -> None:
    # On a CPU the hybrid plugin cannot train models with batch normalization.
    trained, kinds = [], ZERO if IS_THOROUGH or len(division) == 2 else ZERO[1::2]
    for kind in kinds:
        run = boosted(kind, Normalized(), loader=DROP_LAST)
        sizes = [size for share in run.plugin.batch_balancer.allocation.shares for size in share.sizes]
        assert sum(sizes) == 8 and 1 not in sizes, (kind, sizes)
        run.divide(division)
        for batch in run.loader:
            assert len(batch[0]) == (run.loader.current.samples or 2), kind
            parameters = fit(run.model, run.optimizer, [batch])
        trained.append(parameters)
    # One process, which normalizes each micro-batch by itself.
    data, model = Numbered(), Normalized()
    optimizer = zero_runs.make_optimizer(model, "sgd")
    for done in range(0, SAMPLES - SAMPLES % 8, 8):
        for size in [size for sizes in division for size in sizes if size]:
            inputs, targets = zip(*(data[index] for index in range(done, done + size)), strict=True)
            (cross_entropy(model(torch.stack(inputs)), torch.stack(targets)) * size / 8).backward()
            done += size
        make_step(optimizer)
    assert_trained([trained], kinds, flat(model), atol=1e-5)


def summed(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="sum")


def for_each_sample(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1], reduction="none").expand(2)


def failing(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise KeyError("no such column")
    return criterion(model(batch[0]), batch[1])


@on(2)
@unmeasured
def losses_that_are_no_means_are_refused(folder: Path) -> None:
    factor = float("nan") if dist.get_rank() == 1 else 1.0
    no_number = lambda model, criterion, batch: criterion(model(batch[0]), batch[1]) * factor  # noqa: E731
    cases: list[tuple[Callable, type[Exception], str]] = [
        (summed, ValueError, "the loss is a sum over the samples"),
        (no_number, ValueError, r"rank 1: the loss of each of the first samples is not a finite number \(it is nan"),
        (for_each_sample, RuntimeError, r"returned a tensor of shape \[2\] instead of a scalar"),
        (failing, RuntimeError, "rank 1: KeyError: 'no such column'"),
    ]
    for kind in KINDS:
        for step, error, words in cases:
            if kind != "hybrid" and step is for_each_sample:
                continue  # the search for a stage fails first
            with pytest.raises(error, match=words):
                boosted(kind, training_step=step)
        path = f"{folder}/{kind}.json"
        boosted(kind, profile=path)
        with pytest.raises(ValueError, match="the loss is a sum"):
            boosted(kind, profile=path, training_step=summed)


@on(2)
def single_samples_are_refused(folder: Path) -> None:
    path = f"{folder}/profile.json"
    with pytest.raises(RuntimeError, match="batch normalization needs more than one value per channel"):
        boosted(1, Normalized(), max_micro_batch=1)
    with pytest.raises(ValueError, match=r"a global batch of 1 .* use drop_last=True"):
        boosted(1, Normalized(), samples=7, profile=path)
    assert json.loads(Path(path).read_text())["kinds"][0]["min_batch"] == 2
    with pytest.raises(ValueError, match="at least 2 samples, but max_micro_batch=1"):
        boosted(1, Normalized(), profile=path, max_micro_batch=1)
    with pytest.raises(ValueError, match="accumulation='per_rank' is not possible"):
        boosted(1, Normalized(), loader=DROP_LAST, accumulation="per_rank")


def change_kinds(path: str, **changes: Any) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        content = json.loads(Path(path).read_text())
        for number, kind in enumerate(content["kinds"]):
            kind.update({key: change(number) for key, change in changes.items()})
        Path(path).write_text(json.dumps(content))
    dist.barrier()


@on(2)
def profiles_are_kept_in_files(folder: Path) -> None:
    measured = Mock(wraps=attach.profile_ranks)
    with patch.object(attach, "profile_ranks", measured):
        for number, kind in enumerate(KINDS):
            plugins = [boosted(kind, samples=8, profile=f"{folder}/{kind}.json").plugin for _ in range(2)]
            assert measured.call_count == number + 1, kind
            first, second = (plugin.batch_balancer.allocation.shares for plugin in plugins)
            assert first == second and sum(share.samples for share in first) == 8, kind
            dist.barrier()
        file = f"{folder}/1.json"
        with pytest.raises(ValueError, match="made at stage 1, not 2"):
            boosted(2, samples=6, profile=file)
        with pytest.raises(ValueError, match=r"does not exist on ranks \[1\]; copy it to their machines"):
            boosted(1, samples=8, profile=file if dist.get_rank() == 0 else f"{folder}/none.json")
        for path in ("/proc/profile.json", f"{folder}/1.json/profile.json", f"{folder}/no/profile.json"):
            with pytest.raises(ValueError, match=f"profile='{path}' cannot be written"):
                boosted(1, profile=path)
        # A user may edit the profile. Here it then says that rank 1 is much slower, so rank 1 gets fewer samples.
        change_kinds(file, points=lambda rank: [dict(batch=size, seconds=size * (1 + 4 * rank)) for size in (1, 4, 8)])
        fast, slow = boosted(1, samples=6, profile=file).plugin.allocation.shares
        assert (fast.samples, slow.samples) == (5, 1)
        # It keeps its limits, whoever has set them.
        change_kinds(file, max_batch=lambda _: 3)
        with patch.object(attach, "print_on_rank_0") as told:
            plugin = boosted(1, samples=20, profile=file).plugin
        assert max(share.micro_batch for share in plugin.allocation.shares) <= 3
        limit = "limits micro-batches to 3 samples, though memory does not; remove the file to measure again"
        assert sum(limit in call.args[0] for call in told.call_args_list) == 1
        assert measured.call_count == len(KINDS)


def stage_of(model: nn.Module) -> int:
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        return 0
    return 3 if isinstance(model, TorchFSDPModel) else 1


def train_above(highest: int, stage: int | str, precision: str) -> tuple[int, torch.Tensor]:
    def training_step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        loss = criterion(model(batch[0]), batch[1])
        if dist.get_rank() == 1 and stage_of(model) <= highest:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return loss

    run = boosted(stage, None, "adamw", division=[[7], [1]], precision=precision, training_step=training_step)
    assert isinstance(run.plugin.stage, int)
    return run.plugin.stage, run.fit()


@on(2)
@unmeasured
def auto_chooses_the_first_stage_that_fits_on_all_ranks() -> None:
    # `stage_of` cannot distinguish stages 1 and 2, so either both fail or neither does.
    for highest, precision, expected in ((-1, "bf16", 0), (0, "fp32", 1), (1, "bf16", 3), (1, "fp32", 3)):
        what = f"no memory up to stage {highest}, {precision}"
        stage, parameters = train_above(highest, "auto", precision)
        assert stage == expected, what
        # The stages that were tried before have no effect on training.
        assert torch.equal(parameters, train_above(-1, expected, precision)[1]), what


@on(2)
def a_model_that_does_not_fit_is_reported_on_all_ranks() -> None:
    every = r"rank 1 \(cpu.*not enough memory for one sample at any of the stages 0, 1, 2, 3"
    for highest, stage, words in ((3, "auto", every), (1, 1, r'rank 1 \(cpu.*at stage 1; try stage="auto"')):
        with pytest.raises((RuntimeError, ValueError), match=words):
            train_above(highest, stage, "fp32")


# In training ---------------------------------------------------------------------------------------------------------


FORWARD, BACKWARD, DATA, STEP, WAITING = 1.0, 2.0, 0.5, 7.0, 100.0
"""What a sample, an optimizer step and a collective take, in seconds of the test's clock."""


class Clock:
    now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SlowNet(Net):
    clock: Clock | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.clock is None or not self.training:
            return super().forward(inputs)
        self.clock.advance(FORWARD * len(inputs))
        outputs = super().forward(inputs)
        outputs.register_hook(lambda gradient: self._during_backward(len(inputs)))
        return outputs

    def _during_backward(self, samples: int) -> None:
        clock = self.clock
        assert clock is not None
        clock.advance(BACKWARD * samples)
        # DDP waits in a function of the same kind.
        Variable._execution_engine.queue_callback(lambda: clock.advance(WAITING))


class SlowData(Numbered):
    clock: Clock | None = None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.clock is not None:
            self.clock.advance(DATA)
        return super().__getitem__(index)


@contextmanager
def moved_clock() -> Iterator[Clock]:
    """In the block, events are timed by the clock, on which every collective takes a while."""
    clock = Clock()
    real = {name: getattr(dist, name) for name in busy_timer.COLLECTIVES if hasattr(dist, name)}

    def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            clock.advance(WAITING)
            return collective(*args, **kwargs)

        vars(run).pop("tells_waits", None)
        return run

    slowed = {name: slow(collective) for name, collective in real.items()}
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    with patch.multiple(dist, **slowed), patch.object(accelerator, "time", time):
        yield clock


@unmeasured
def measure(stage: int, division: list[list[int]]) -> list[TimedGlobalBatch]:
    torch.manual_seed(3)
    data, model = SlowData(), SlowNet()
    optimizer = zero_runs.make_optimizer(model, "sgd")
    options = dict(loader=dict(shuffle=True), division=division, reallocate_above=math.inf)
    with moved_clock() as clock:
        optimizer.register_step_post_hook(lambda *_: clock.advance(STEP))
        plugin, _, trained, optimizer, criterion, loader, _ = boosted(stage, model, optimizer, data, **options)
        model.clock = data.clock = clock
        for inputs, targets in loader:
            loss = criterion(trained(inputs), targets)
            dist.all_reduce(torch.zeros(1))  # as scripts do for their logs
            make_step(optimizer, loss)
            if loader.current.is_last:
                clock.advance(1000.0)  # as an evaluation
        return plugin.batch_balancer._timer.take()


@on(2, (0, 1, 2, 3), [[5], [3]])
@on(2, (0, 1, 2, 3), [[2, 2, 1], [1, 1, 1]])
@on(3, (1, 3), [[2, 1], [3, 0], [1, 1]])
def the_timer_tells_work_from_waiting(stages: tuple[int, ...], division: list[list[int]]) -> None:
    for stage in stages:
        timed = measure(stage, division)
        sizes = [tuple(zero_runs.sizes_by_rank(division, samples)[dist.get_rank()]) for samples in (8, 8, 8, 5)]
        assert [each.sizes for each in timed] == sizes, stage
        for each in timed:
            samples = sum(max(size, 1) for size in each.sizes)
            assert each.work_seconds == pytest.approx((FORWARD + BACKWARD) * samples), (stage, each)
            assert each.data_seconds == pytest.approx(DATA * samples), (stage, each)
            assert each.step_seconds == pytest.approx(STEP), (stage, each)
            # The loop's own collective and the end of each backward pass.
            assert each.waiting_seconds >= 2 * WAITING * len(each.sizes), (stage, each)


@on(3)
def collectives_inside_a_replica_are_its_work() -> None:
    inside, between, rank = dist.new_group([0, 1]), dist.new_group([1, 2]), dist.get_rank()
    with moved_clock():
        timer = BusyTimer([0, 0, 1])
        timer.before_batch()
        timer.after_batch(1)
        if rank < 2:
            dist.all_reduce(torch.zeros(1), group=inside)
            dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.zeros(1), inside)
        if rank > 0:
            dist.all_reduce(torch.zeros(1), dist.ReduceOp.SUM, between, async_op=True).wait()
        optimizer = SimpleNamespace(backward=lambda loss: None, step=lambda: None)
        timer.attach(optimizer)
        optimizer.step()
        (timed,) = timer.take()
    assert (timed.work_seconds, timed.waiting_seconds) == (2 * WAITING * (rank < 2), WAITING * (rank > 0))


# Decisions are tested in tests/unit/planner/batches/test_closed_loop.py.


@unmeasured
def change_speed(
    kind: int | str, slow: int, slowdowns: list[float], check_every: int | None = None
) -> tuple[list[list[int]], Any, list[float]]:
    """Train an epoch for each of ``slowdowns``, of which so many measure that rank ``slow`` is so slow. Returns the
    samples of each rank after each epoch, the plugin, and the iterations that were reported."""
    given: list[dict[str, float]] = []
    reports = dict(on_report=given.append, report_every=3)
    run = boosted(kind, loader=dict(shuffle=True), check_every=check_every, **reports)
    plugin, _, model, optimizer, criterion, loader, _ = run
    timed: list[TimedGlobalBatch] = []

    def take() -> list[TimedGlobalBatch]:
        taken = list(timed)
        timed.clear()
        return taken

    plugin.batch_balancer._timer.take = take
    samples = []
    for slowdown in slowdowns:
        ids: list[int] = []
        sizes: list[int] = []
        for inputs, targets in loader:
            sizes.append(loader.current.samples)
            ids += inputs[:, 7].long().tolist() if loader.current.samples else []
            optimizer.backward(criterion(model(inputs), targets))
            if loader.current.is_last:
                work = sum(max(size, 1) for size in sizes) * (slowdown if dist.get_rank() == slow else 1.0)
                timed.append(TimedGlobalBatch(tuple(sizes), work, 0.0, 50.0, 0.0))
                sizes = []
            make_step(optimizer)
        assert sorted(itertools.chain(*of_all_ranks(ids))) == list(range(len(Numbered())))
        samples.append([share.samples for share in plugin.batch_balancer.allocation.shares])
    return samples, plugin, [numbers["iteration"] for numbers in given]


def share_of(slow: int, samples: int, others: int) -> list[int]:
    return [samples, others] if slow == 0 else [others, samples]


@on(2)
def batches_are_divided_again_after_a_change_of_speed() -> None:
    cases: list[dict[str, Any]] = [
        dict(kind=stage, slow=slow, check_every=check_every)
        for stage in (0, 1, 2, 3)
        for slow in (0, 1)
        for check_every in (None, 1, 3)
        if IS_THOROUGH or (slow == stage % 2 and check_every == (None, 1, 3)[stage % 3])
    ]
    for case in (*cases, dict(kind="hybrid", slow=1, check_every=1)):
        samples, plugin, _ = change_speed(slowdowns=[1, 3, 3, 3, 1, 1, 1], **case)
        assert [samples[epoch] for epoch in (0, 3, 6)] == [[4, 4], share_of(case["slow"], 2, 6), [4, 4]], case
        assert plugin.batch_balancer.reallocations == 2, case


@on(2, 0, 0.75, (5, 3), 3.75)
@on(2, 1, 1.34, (3, 5), 5.0)
def a_wrong_profile_is_corrected_and_reported(slow: int, factor: float, fitted: tuple[int, int], best: float) -> None:
    """With one of eight samples moved, a global batch takes 3.75 s instead of 4, or 5 s instead of 5.36."""
    samples, plugin, given = change_speed(1, slow, [factor] * 2)
    expected, report = share_of(slow, *fitted), plugin.report()
    assert given == ([3, 6] if dist.get_rank() == 0 else [])  # after so many of eight steps
    batches = report.batches
    assert samples[1] == [share.samples for share in batches.shares] == expected and batches.changes == 1
    assert batches.shares[slow].slowdown == pytest.approx(factor, rel=0.01)
    # The slower rank takes 4 samples in equal parts.
    assert batches.equal_seconds == pytest.approx(4 * max(factor, 1.0), rel=0.01)
    assert batches.iteration_seconds == pytest.approx(best, rel=0.01)
    text = " ".join(str(report).split())
    assert "by rank (times in s" in text and "times as long). It was divided again 1 time." in text
    assert report.numbers()[f"batches/rank{slow}/samples"] == expected[slow]
