"""HeteroZeroPlugin against one process that trains on the same global batches, whatever each rank's part of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import nn
from torch.utils.data import Dataset

from colossal_hetero import HeteroZeroPlugin
from tests.support.harness import run_ranks

SAMPLES = 29
EPOCHS = 2


class Numbered(Dataset):
    """Samples that know their number, so that a test can tell who trained on what."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(samples, 7, generator=generator)
        self.targets = torch.randint(3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([self.inputs[index], torch.tensor([float(index)])]), self.targets[index]


class Net(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(nn.functional.gelu(self.norm(self.first(inputs[:, :7]))))


def make_model() -> Net:
    torch.manual_seed(3)
    return Net()


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def sizes_by_rank(division: list[list[int]], samples: int) -> list[list[int]]:
    """``division`` of a full global batch; a smaller one is cut off behind, each rank keeping its number of
    micro-steps."""
    left, result = samples, []
    for sizes in division:
        kept = []
        for size in sizes:
            kept.append(min(size, left))
            left -= kept[-1]
        result.append(kept)
    return result


def train(
    stage: int,
    global_batch_size: int,
    division: list[list[int]],
    optimizer_name: str = "sgd",
    options: dict[str, Any] | None = None,
    user_clip: float = 0.0,
) -> dict[str, Any]:
    """Train as a script does, with that division; what this rank trained on, and the parameters at the end."""
    plugin = HeteroZeroPlugin(stage, global_batch_size, max_micro_batch=8, **(options or {}))
    loader = plugin.prepare_dataloader(Numbered(), shuffle=True, seed=11)
    model = make_model()
    optimizer = make_optimizer(model, optimizer_name)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, criterion, loader, schedule = Booster(plugin=plugin).boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, schedule
    )
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    batches: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            micro_batch = loader.current
            ids = inputs[:, 7].long().tolist() if micro_batch.samples else []
            batches.append([epoch, micro_batch.global_batch, *ids])
            if plugin.batches.accumulation == "shared":
                # A collective of the loop's own, as scripts have for their logs: it must meet its peers.
                torch.distributed.all_reduce(torch.zeros(1))
            loss = criterion(model(inputs), targets)
            optimizer.backward(loss)
            if user_clip:
                optimizer.clip_grad_by_norm(user_clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return {"batches": batches, "parameters": full_parameters(model), "lr": optimizer.param_groups[0]["lr"]}


def full_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The whole model's parameters, in order, on every rank."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    for module in model.modules():
        if isinstance(module, FSDP):
            with FSDP.summon_full_params(module):
                return [value.detach().clone().flatten().float() for value in module.module.parameters()]
    return [value.detach().clone().flatten().float() for value in model.parameters()]


def train_alone(batches: list[list[int]], optimizer_name: str, max_norm: float = 0.0) -> tuple[torch.Tensor, float]:
    """One process, the same global batches in their order; the parameters at the end, flat, and the learning rate."""
    data, model = Numbered(), make_model()
    optimizer = make_optimizer(model, optimizer_name)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in batches:
        inputs, targets = zip(*(data[index] for index in batch), strict=True)
        nn.functional.cross_entropy(model(torch.stack(inputs)), torch.stack(targets)).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return torch.cat([value.detach().flatten() for value in model.parameters()]), optimizer.param_groups[0]["lr"]


def global_batches(results: list[dict[str, Any]], global_batch_size: int) -> list[list[int]]:
    """What trained together, in order; fails unless every sample trained exactly once per epoch."""
    together: dict[tuple[int, int], list[int]] = {}
    for result in results:
        for epoch, index, *ids in result["batches"]:
            together.setdefault((epoch, index), []).extend(ids)
    for epoch in range(EPOCHS):
        seen = Counter(each for (of, _), ids in together.items() if of == epoch for each in ids)
        assert seen == Counter(range(SAMPLES))
    sizes = [len(together[0, index]) for index in range(-(-SAMPLES // global_batch_size))]
    assert sizes == [global_batch_size] * (SAMPLES // global_batch_size) + [SAMPLES % global_batch_size]
    return [together[key] for key in sorted(together)]


DIVISIONS = {
    "7 + 1": (8, [[7], [1]]),
    "1 + 7": (8, [[1], [7]]),
    "5 + 0": (5, [[5], [0]]),
    "0 + 5": (5, [[0], [5]]),
    "(4, 3) + (2, 2)": (11, [[4, 3], [2, 2]]),
    "(3, 2, 1) + (1, 1, 0)": (8, [[3, 2, 1], [1, 1, 0]]),
    "5 + 1 + 2": (8, [[5], [1], [2]]),
    "(2, 1) + (3, 0) + (1, 4)": (11, [[2, 1], [3, 0], [1, 4]]),
    "1 + 4 + 0 + 6": (11, [[1], [4], [0], [6]]),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", DIVISIONS)
def test_training_is_that_of_one_process(stage: int, name: str) -> None:
    global_batch_size, division = DIVISIONS[name]
    results = run_ranks(len(division), train, stage, global_batch_size, division)
    expected, rate = train_alone(global_batches(results, global_batch_size), "sgd")
    for result in results:
        # Sums in another order: rounding, nothing else.
        torch.testing.assert_close(torch.cat(result["parameters"])[: len(expected)], expected, rtol=1e-4, atol=1e-6)
        assert result["lr"] == pytest.approx(rate)


def check(
    results: list[dict[str, Any]],
    global_batch_size: int,
    optimizer_name: str = "sgd",
    max_norm: float = 0.0,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    expected, _ = train_alone(global_batches(results, global_batch_size), optimizer_name, max_norm)
    for result in results:
        torch.testing.assert_close(torch.cat(result["parameters"])[: len(expected)], expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_adaptive_optimizer(stage: int) -> None:
    division = [[4, 3], [2, 2]]
    # AdamW divides by the root of what may be near 0, which enlarges the rounding of sums in another order.
    check(run_ranks(2, train, stage, 11, division, "adamw"), 11, "adamw", rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("by_script", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_is_that_of_the_whole_gradient(stage: int, by_script: bool) -> None:
    division, norm = [[4, 3], [1, 3]], 0.2
    options = {} if by_script else {"max_norm": norm}
    results = run_ranks(2, train, stage, 11, division, "sgd", options, norm if by_script else 0.0)
    check(results, 11, max_norm=norm)


@pytest.mark.parametrize("stage", [0, 1])
def test_each_rank_with_its_own_number_of_micro_batches(stage: int) -> None:
    division = [[2, 2, 2, 1], [1]]
    check(run_ranks(2, train, stage, 8, division, "sgd", {"accumulation": "per_rank"}), 8)
    check(run_ranks(2, train, stage, 8, division[::-1], "sgd", {"accumulation": "per_rank"}), 8)


@pytest.mark.parametrize(
    ("stage", "precision", "options"),
    [
        (0, "bf16", {}),
        (1, "bf16", {}),
        (2, "bf16", {}),
        (3, "bf16", {}),
        (1, "fp16", {"initial_scale": 2**8}),
        (2, "fp16", {"initial_scale": 2**8}),
    ],
)
def test_half_precision_is_near_full(stage: int, precision: str, options: dict[str, Any]) -> None:
    division = [[4, 3], [2, 2]]
    results = run_ranks(2, train, stage, 11, division, "sgd", {"precision": precision, **options})
    # bfloat16 has 8 bits: a step's error is some thousandths of it, and there are six steps.
    check(results, 11, rtol=0.05, atol=0.02)


def test_loss_scaling_that_overflows_skips_the_step_on_all_ranks() -> None:
    division = [[4, 3], [2, 2]]
    options = {
        "precision": "fp16",
        "initial_scale": 2.0**40,
        "max_scale": 2.0**40,
        "hysteresis": 1,
        "backoff_factor": 0.5,
    }
    first, second = run_ranks(2, train, 1, 11, division, "sgd", options)
    for one, other in zip(first["parameters"], second["parameters"], strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


def leave_early(stage: int) -> dict[str, Any]:
    """Leave an epoch within a global batch; the next one begins as if that had not happened."""
    plugin = HeteroZeroPlugin(stage, 8, max_micro_batch=8)
    loader = plugin.prepare_dataloader(Numbered(), shuffle=True, seed=11)
    model = make_model()
    optimizer = make_optimizer(model, "sgd")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, criterion, loader, schedule = Booster(plugin=plugin).boost(
        model, optimizer, nn.CrossEntropyLoss(), loader, schedule
    )
    loader.divide_by(lambda samples: sizes_by_rank([[3, 2], [1, 2]], samples))
    for inputs, targets in loader:
        optimizer.backward(criterion(model(inputs), targets))
        optimizer.step()
        schedule.step()
        break
    batches: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            micro_batch = loader.current
            ids = inputs[:, 7].long().tolist() if micro_batch.samples else []
            batches.append([epoch, micro_batch.global_batch, *ids])
            optimizer.zero_grad()
            optimizer.backward(criterion(model(inputs), targets))
            optimizer.step()
            schedule.step()
    return {"batches": batches, "parameters": full_parameters(model)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_global_batch_that_is_left_half_done_leaves_nothing(stage: int) -> None:
    check(run_ranks(2, leave_early, stage), 8)
