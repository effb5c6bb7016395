"""Each micro-batch gets the weight of its samples or tokens, also if batches are smaller than planned, must have a
multiple of samples, or are what a loop counts by; as one process trains on the same global batches. So do models of
which a rank uses only a part of the parameters."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, default_collate

from tests.support import zero_runs
from tests.support.checks import if_thorough, on
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import make_step
from tests.support.zero_runs import Boosted, assert_trained, boosted, fit, flat, global_batches, unmeasured

SAMPLES, GLOBAL_BATCH = 32, 8
BROKEN = {0, 3, 9, 12, 16, 28}  # samples that cannot be read; each micro-batch of the divisions has others
DIVISIONS = {2: [[[5], [3]], [[3, 2], [2, 1]]], 3: [[[2], [4], [2]], [[2, 1], [2, 1], [1, 1]]]}
EMPTY = [[6, 0], [0, 2]]


class Images(Dataset):
    def __init__(self, *broken: int) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        if index in self._broken:
            return None
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 3


def readable(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@unmeasured
def boost(stage: int | str, data: Dataset, division: Any, collate: Any = None, **options: Any) -> Boosted:
    fixed = dict(reallocate_above=float("inf"), max_micro_batch=8, loader=dict(collate_fn=collate))
    return boosted(stage, net(), sgd, data, division=division, **fixed, **options)


def train_alone(batches: list[Any], loss_of: Any = zero_runs.loss_of) -> Tensor:
    model = net()
    return fit(model, sgd(model), batches, loss_of)


def collated(data: Any, collate: Any) -> list[Any]:
    return [collate([data[first + index] for index in range(8)]) for first in range(0, SAMPLES, GLOBAL_BATCH)]


def divisions() -> list[list[list[int]]]:
    return DIVISIONS[torch.distributed.get_world_size()]


@on(2, (0, 1, 2, 3))
@if_thorough(3, (0, 1))
def samples_that_collate_fn_leaves_out_count_nothing(stages: tuple[int, ...]) -> None:
    cases = [(stage, division) for stage in stages for division in divisions()]
    found = [boost(stage, Images(*BROKEN), division, readable).fit() for stage, division in cases]
    assert_trained([found], cases, train_alone(collated(Images(*BROKEN), readable)))


@on(2)
def one_batch_can_be_trained_on_again() -> None:
    run = boost(0, Images(*BROKEN), [[5], [3]], readable, accumulation="per_rank")
    found = fit(run.model, run.optimizer, [next(iter(run.loader))] * 3)
    assert_trained([[found]], ["one batch"], train_alone(collated(Images(*BROKEN), readable)[:1] * 3))


@on(2)
def samples_that_the_loop_leaves_out_are_refused() -> None:
    for stage in (0, 1):
        _, _, model, optimizer, _, loader, _ = boost(stage, Images(), [[5], [3]])
        inputs, targets = next(iter(loader))
        for part in (slice(0, 1), slice(1, None)):  # in parts, but all of them
            optimizer.backward(cross_entropy(model(inputs[part]), targets[part]) * len(inputs[part]) / len(inputs))
        make_step(optimizer)
        inputs, targets = next(iter(loader))
        optimizer.backward(cross_entropy(model(inputs[1:] * 2), targets[1:]))
        with pytest.raises(RuntimeError, match=r"the model was given \d+% of the samples of micro-batch 0"):
            optimizer.step()


@on(2)
def mixup_gets_even_batches() -> None:
    mixup = Mixup(mixup_alpha=0.8, num_classes=3)

    def step(model: nn.Module, criterion: Any, batch: Any) -> Tensor:
        inputs, targets = mixup(batch[0].view(-1, 1, 2, 3), batch[1])
        return criterion(model(inputs.flatten(1)), targets)

    for stage in (0, 1, "auto"):
        run = boosted(stage, net(), sgd, Images(), samples=12, loader=dict(drop_last=True), training_step=step)
        assert run.loader.multiple_of == 2
        run.fit(lambda model, batch, run=run: step(model, run.criterion, batch))
    with pytest.raises(ValueError, match="of an epoch has 8 samples, which is not a multiple of 3"):
        boosted(0, net(), sgd, Images(), samples=12, multiple_of=3)


def train_with_average(batches: Any, model: nn.Module, optimizer: Any, kind: str, total_steps: int) -> Tensor:
    """The average of weights, with a schedule that was not boosted."""
    inner_optimizer, inner = getattr(optimizer, "optim", optimizer), getattr(model, "module", model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(inner_optimizer, max_lr=0.5, total_steps=total_steps)
    if kind == "torch":
        average: Any = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    else:
        average = ModelEmaV3(inner, decay=0.5)
    for batch in batches:
        fit(model, optimizer, [batch])
        schedule.step()
        average.update_parameters(inner) if kind == "torch" else average.update(inner)
    return torch.cat([value.detach().flatten() for value in average.module.parameters()])


@on(2)
def schedules_and_averages_of_weights_count_steps() -> None:
    batches = collated(Images(), default_collate)
    for kind in ("torch", "timm"):
        model = net()
        expected = train_with_average(batches, model, sgd(model), kind, len(batches))
        for division in DIVISIONS[2]:
            run = boost(1, Images(), division)
            found = train_with_average(run.loader, run.model, run.optimizer, kind, run.loader.global_batches)
            assert_trained([[found]], [(kind, division)], expected)


LENGTH, WORDS, IGNORED = 9, 31, -100


class Sentences(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        labels[: LENGTH if index == 13 else index * 5 % LENGTH] = IGNORED
        return {"input_ids": words, "labels": labels}


class Rare(Sentences):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return sample if 8 <= index < 16 else {"input_ids": sample["input_ids"], "labels": sample["input_ids"]}


def causal() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    drops = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


def masked() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **drops))


MODELS = {"causal": causal, "masked": masked}
WEIGHTS = {"causal": "next_tokens", "masked": "tokens"}


def language_model(stage: int, name: str, data: Dataset | None = None, **options: Any) -> Boosted:
    fixed = dict(criterion=None, max_micro_batch=8)
    return boosted(stage, MODELS[name](), fast_sgd, data or Sentences(), **fixed, **options)


def fast_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(batches: Any, model: Any, optimizer: Any, every: int, backward: Any, mean_of: Any) -> tuple[Tensor, Any]:
    """The parameters after two epochs, and the mean loss of each global batch, of which ``every`` so many are
    accumulated; ``mean_of`` knows it in the last micro-batch."""
    means = []
    for batch in (batch for _ in range(2) for batch in batches):
        loss = model(**batch).loss
        backward(loss / every)
        mean = mean_of(loss)
        means += [] if mean is None else [mean]
        if mean is not None and len(means) % every == 0:
            make_step(optimizer)
    return flat(model), means


@on(2)
@unmeasured
def tokens_are_counted_at_each_stage() -> None:
    cases: list[Any] = [
        (stage, name, division, WEIGHTS[name])
        for stage in (0, 1, 2, 3)
        for number, name in enumerate(MODELS)
        for index, division in enumerate((*DIVISIONS[2], EMPTY))
        if IS_THOROUGH or index == (stage + number) % 3
    ]
    cases += [(stage, "causal", DIVISIONS[2][0], "next_tokens", 2) for stage in (0, 1)]
    cases += [(1, "masked", DIVISIONS[2][1], lambda batch: (batch["labels"] >= 0).sum())]
    for case in cases:
        stage, name, division, weight_by, every = (*case, 1)[:5]
        run = language_model(stage, name, division=division, weight_by=weight_by)
        # Such a loop asks for ``is_last``, because it steps in the last micro-batch.
        mean = lambda loss, loader=run.loader: (loader.mean(loss), loader.is_last)[0]  # noqa: E731
        parameters, means = train(run.loader, run.model, run.optimizer, every, run.optimizer.backward, mean)
        model, batches = MODELS[name](), global_batches(Sentences(), GLOBAL_BATCH)
        expected, wanted = train(batches, model, fast_sgd(model), every, Tensor.backward, Tensor.item)
        assert_trained([[parameters]], [case], expected, atol=1e-5)
        assert means == pytest.approx(wanted, rel=1e-4), case


@on(2)
@unmeasured
def losses_whose_weights_cannot_be_found_are_refused() -> None:
    for name in MODELS:
        with pytest.raises(ValueError, match=r"give weight_by.*causal language models"):
            language_model(0, name)
    iterator = iter(language_model(0, "causal", Rare()).loader)
    next(iterator)
    words = "has labels of -100, which the samples that were compared before training did not have"
    with pytest.raises(RuntimeError, match=words):
        next(iterator)


# Parameters that some ranks do not use -------------------------------------------------------------------------------


STEPS = 5
TASKS = (0, 0, 1, 1, 0, 1, 2, 2)
"""By place in a global batch: the head that a sample uses. The last samples are those of the last rank."""
WHOLE = {2: [[6], [2]], 3: [[5], [2], [1]]}
REVERSED = {2: [[2], [6]], 3: [[1], [3], [4]]}
PARTS = {2: [[4, 2], [1, 1]], 3: [[2, 2], [2, 0], [1, 1]]}


class Mixed(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(STEPS * GLOBAL_BATCH, 6, generator=generator)
        self.targets = torch.randn(STEPS * GLOBAL_BATCH, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int, Tensor]:
        step, place = divmod(index, GLOBAL_BATCH)
        has_second = place in (1, 7) and step != 1
        return self.inputs[index], TASKS[place], int(has_second), self.targets[index]


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 7)
        self.heads = nn.ModuleList(nn.Linear(7, 3) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(7, 7, bias=number > 0) for number in range(4))
        self.second_input = nn.Linear(6, 7)
        self.never = nn.Linear(5, 3)
        self.positives = nn.Linear(7, 1)

    def forward(self, inputs: Tensor, tasks: Tensor, has_second: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(inputs))
        if has_second.any():
            hidden = hidden + self.second_input(inputs) * has_second[:, None]
        chosen = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0.8).long()
        hidden = hidden + _routed(self.experts, hidden, chosen)
        positive = inputs[:, 2] > 1.0
        # A term of the loss that is a mean over samples and is left out if none is positive.
        term = self.positives(hidden[positive]).square().sum() / len(inputs) if positive.any() else hidden.new_zeros(())
        return _routed(self.heads, hidden, tasks), term


def _routed(modules: nn.ModuleList, hidden: Tensor, chosen: Tensor) -> Tensor:
    rows = [(chosen == number).nonzero()[:, 0] for number in chosen.unique().tolist()]
    parts = [modules[chosen[index[0]]](hidden[index]) for index in rows]
    return torch.cat(parts)[torch.cat(rows).argsort()]


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Optimizers that change a parameter without a gradient, if they get zeros for it."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.3)


def mixed_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    outputs, term = model(*batch[:3])
    return nn.functional.mse_loss(outputs, batch[3]) + term


def train_heads(stage: int, division: list[list[int]], optimizer_name: str, **options: Any) -> Tensor:
    if stage == 0:
        options = dict(find_unused_parameters=True) | options
    if stage in (1, 2):
        options["reduce_bucket_size_in_m"] = 40 / 2**20
    kind = "hybrid" if options.pop("hybrid", False) else stage
    options |= dict(max_micro_batch=8, training_step=lambda model, _, batch: mixed_loss(model, batch))
    make = partial(make_optimizer, name=optimizer_name)
    run = boosted(kind, Heads(), make, Mixed(), criterion=None, division=division, **options)
    run.fit(mixed_loss)
    return run.fit(mixed_loss)


def train_heads_alone(optimizer_name: str, max_norm: float = 0.0) -> Tensor:
    model = Heads()
    return fit(
        model, make_optimizer(model, optimizer_name), global_batches(Mixed(), GLOBAL_BATCH) * 2, mixed_loss, max_norm
    )


CASES: list[tuple[int, str, dict[str, Any]]] = [
    *((stage, "sgd", {}) for stage in range(4)),
    *((stage, "adamw", {}) for stage in (0, 3)),
    (0, "adamw", dict(hybrid=True)),
    (1, "adamw", dict(max_norm=0.3)),
    (1, "sgd", dict(overlap_allgather=True)),
    *((stage, "adamw", dict(overlap_communication=False)) for stage in (1, 2)),
]
RUNS = [(case, sizes) for case in CASES for sizes in ((WHOLE, PARTS) if IS_THOROUGH else (PARTS,))]
RUNS += [((stage, "sgd", {}), REVERSED) for stage in range(4)]


@on(2)
@if_thorough(3)
@unmeasured
def a_parameter_that_a_rank_does_not_use_counts_as_zero() -> None:
    for (stage, name, more), sizes in RUNS:
        division = sizes[torch.distributed.get_world_size()]
        expected = train_heads_alone(name, more.get("max_norm", 0.0))
        case = f"stage {stage}, {name}, {more}, {division}"
        assert_trained([[train_heads(stage, division, name, **more)]], [case], expected, atol=1e-5)


@on(2, False)
@on(2, True)
def stage_0_asks_for_the_search_for_unused_parameters(hybrid: bool) -> None:
    with pytest.raises(RuntimeError, match=r"^this rank has not used .*find_unused_parameters=True"):
        train_heads(0, WHOLE[2], "sgd", find_unused_parameters=False, hybrid=hybrid)
