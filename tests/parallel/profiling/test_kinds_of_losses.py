"""A loss is shown to be the mean over samples, or its weights are asked for: many losses, at random weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset

from colossal_hetero.data_parallel.loader import make_loader
from colossal_hetero.data_parallel.loss_weights import require_mean_over_samples, samples_in
from colossal_hetero.profiling.loss_check import check_loss
from colossal_hetero.profiling.training_step import TrainingStep, TrialRun, default_training_step
from tests.support.checks import on

CLASSES, WIDTH = 5, 6
Make = Callable[[int, torch.Generator], Any]


class Samples(Dataset):
    def __init__(self, make: Make) -> None:
        self._make = make

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Any:
        return self._make(index, torch.Generator().manual_seed(index))


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def length(index: int) -> int:
    return 2 + index * 7 % 11


def classified(index: int, generator: torch.Generator) -> Any:
    return numbers(generator, WIDTH), index % CLASSES


def map_of_pixels(equally_many: bool) -> Make:
    def make(index: int, generator: torch.Generator) -> Any:
        labels = torch.randint(CLASSES, (4, 4), generator=generator)
        labels.flatten()[: 3 if equally_many else index % 13] = 255
        return numbers(generator, 2, 4, 4), labels

    return make


def masked(index: int, generator: torch.Generator) -> Any:
    mask = torch.arange(12) < length(index)
    return dict(x=numbers(generator, 12, WIDTH), y=numbers(generator, 12), mask=mask.float())


def with_zeros(head: Any) -> nn.Module:
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def zero() -> nn.Module:
    return with_zeros(linear())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def pixels() -> nn.Module:
    return with_zeros(nn.Conv2d(2, CLASSES, 1))


def contrastive(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    out = model(batch[0])
    return cross_entropy(out @ out.T, torch.arange(len(out)))


def regression(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    errors = (model(batch["x"]).squeeze(-1) - batch["y"]).square()
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def random_noise(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    return mse_loss(model(batch[0] + torch.randn_like(batch[0])), torch.randn(len(batch[0]), CLASSES))


def in_training_only(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    if not model.training:
        raise RuntimeError("the loss is computed in training mode only")
    return default_training_step(model, criterion, batch)


class Case(NamedTuple):
    name: str
    samples: Make
    expected: str  # ``samples``, or words of the error
    criterion: Any = nn.CrossEntropyLoss()
    model: Callable[[], nn.Module] = zero
    step: TrainingStep = default_training_step
    collate: Any = None


def weighing(*weights: float) -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(torch.tensor(weights))


WITHOUT_255 = nn.CrossEntropyLoss(ignore_index=255)
ASKS = "is not the mean of their losses"
UNKNOWN = "cannot be found out"
CASES = [
    Case("classes", classified, "samples"),
    Case("a loss in training mode only", classified, "samples", step=in_training_only),
    Case("mild class weights", lambda i, g: (numbers(g, WIDTH), i // 18), ASKS, weighing(1, 1, 1.5, 1.5, 2)),
    Case("equal class weights", classified, "samples", weighing(*[3.0] * 5)),
    Case("a class that is hardly seen", lambda i, g: (numbers(g, WIDTH), 1), UNKNOWN, weighing(9.0, *[1.0] * 4)),
    Case("pixels without 255", map_of_pixels(False), ASKS, WITHOUT_255, pixels),
    Case("equally many pixels are left out", map_of_pixels(True), UNKNOWN, WITHOUT_255, pixels),
    Case("samples without a label", lambda i, g: (numbers(g, WIDTH), -100 if i % 4 == 0 else i % CLASSES), ASKS),
    Case("masked regression", masked, ASKS, step=regression, model=lambda: nn.Linear(WIDTH, 1)),
    Case("contrastive", classified, ASKS, step=contrastive, model=linear),
    Case("random noise", classified, "differs from pass to pass", step=random_noise),
    Case("all alike", lambda index, generator: (torch.ones(WIDTH), 1), "have the same loss"),
]


def trial_of(case: Case, dtype: torch.dtype = torch.float32) -> TrialRun:
    torch.manual_seed(0)
    loader = make_loader(Samples(case.samples), 8, 0, 1, collate_fn=case.collate)
    model = case.model().to(dtype)

    def step(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return case.step(model, criterion, batch)

    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrialRun(model, optimizer, case.criterion, step, loader)


def answer(trial: TrialRun, precision: str) -> str:
    try:
        require_mean_over_samples(trial, precision)
        return "samples"
    except ValueError as error:
        return str(error)


@on(2)
def what_each_loss_is_a_mean_over_is_found() -> None:
    for case in CASES:
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            trial = trial_of(case, dtype)
            before = [parameter.detach().clone() for parameter in trial.model.parameters()]
            found = answer(trial, precision)
            assert case.expected in found, f"{case.name} ({precision}): {found}"
            assert all(map(torch.equal, before, trial.model.parameters())), f"{case.name}: parameters changed"


def over_all_ranks(count: Callable[[Tensor], Tensor]) -> TrainingStep:
    def step(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
        x, y = batch
        total = count(torch.tensor(float(len(y))))
        return cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / total

    return step


def by_all_reduce(count: Tensor) -> Tensor:
    dist.all_reduce(count)
    return count


def by_objects(count: Tensor) -> Tensor:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, int(count))
    return torch.tensor(float(sum(every)))


def with_a_log(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    loss = default_training_step(model, criterion, batch)
    by_all_reduce(loss.detach().clone())
    return loss


class Counting(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        loss = cross_entropy(super().forward(x), labels, reduction="sum") * dist.get_world_size()
        return type("Output", (dict,), {})(loss=loss / by_all_reduce(torch.tensor(float(len(labels)))))


def step_of_counting(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    return model(*batch)["loss"]


@on(2)
def losses_that_depend_on_other_ranks_are_refused() -> None:
    world, words = range(dist.get_world_size()), "depends on a value that {} combines over ranks"
    for count, name in ((by_all_reduce, "all_reduce"), (by_objects, "all_gather_object")):
        trial = trial_of(Case("count", classified, "", step=over_all_ranks(count), model=linear))
        with pytest.raises(ValueError, match=words.format(name)):
            check_loss(trial, world)
    trial = trial_of(Case("in it", classified, "", step=step_of_counting, model=lambda: Counting(WIDTH, CLASSES)))
    with pytest.raises(ValueError, match=words.format("all_reduce")):
        check_loss(trial, world)
    assert check_loss(trial, [0] * len(world)) == 1  # all ranks hold one replica, whose model is divided over them
    assert check_loss(trial_of(Case("log", classified, "", step=with_a_log)), world) == 1


def mixed(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    """As timm's Mixup: a sample is mixed with that at the same place from the end."""
    x, y = batch
    assert len(x) % 2 == 0, "Batch size should be even when using this"
    share = torch.rand(()).item()
    out = model(share * x + (1 - share) * x.flip(0))
    return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y.flip(0))


def triplets(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    anchor, positive, negative = model(batch[0]).view(-1, 3, CLASSES).unbind(1)
    return nn.functional.triplet_margin_loss(anchor, positive, negative, margin=100.0)


def two_at_least(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    if len(batch[1]) < 2:
        raise ValueError("a single sample has no variance")
    return default_training_step(model, criterion, batch)


def fails(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
    raise KeyError("labels")


@on(2)
def a_step_may_need_several_samples_at_once() -> None:
    world = range(dist.get_world_size())
    for step, multiple, weight in (
        (default_training_step, 1, "samples"),
        (mixed, 2, "samples"),
        (two_at_least, 1, None),
        (triplets, 3, None),
    ):
        trial = trial_of(Case("multiple", classified, "", step=step, model=linear))
        assert check_loss(trial, world) == multiple, step
        assert weight is None or answer(trial, "fp32") == weight, step
    with pytest.raises(RuntimeError, match="KeyError: 'labels'"):
        check_loss(trial_of(Case("multiple", classified, "", step=fails)), world)
    with pytest.raises(RuntimeError, match="Batch size should be even"):
        check_loss(trial_of(Case("multiple", classified, "", step=mixed)), world, multiple_of=3)


def leaving_out(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample[1] not in (0, 3)])


def ragged(index: int, generator: torch.Generator) -> Any:
    return numbers(generator, length(index), WIDTH), index % CLASSES


def packed(samples: list[Any]) -> Any:
    sequences, labels = zip(*samples, strict=True)
    return torch.cat(sequences), torch.tensor([len(each) for each in sequences]), torch.tensor(labels)


@on(2)
def samples_that_a_batch_leaves_out_or_packs_are_counted() -> None:
    trial = trial_of(Case("left out", classified, "", collate=leaving_out))
    assert check_loss(trial, range(dist.get_world_size())) == 1
    assert trial.first == 1
    assert answer(trial, "fp32") == "samples"
    count = samples_in(trial)
    assert count is not None and count(trial.batch(range(10))) == 6
    assert samples_in(trial_of(CASES[0])) is None
    count = samples_in(trial := trial_of(Case("packed", ragged, "", collate=packed)))
    assert count is not None and count(trial.batch(range(10))) == 10  # and not the number of rows
