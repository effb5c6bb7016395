"""Models of which a rank uses only a part of the parameters train as one process does on the same global batches."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.support.checks import if_thorough, on
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import assert_trained, boosted, fit, global_batches, unmeasured

GLOBAL_BATCH, STEPS = 8, 5
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


def train(stage: int, division: list[list[int]], optimizer_name: str, **options: Any) -> Tensor:
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


def train_alone(optimizer_name: str, max_norm: float = 0.0) -> Tensor:
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
        expected = train_alone(name, more.get("max_norm", 0.0))
        case = f"stage {stage}, {name}, {more}, {division}"
        assert_trained([[train(stage, division, name, **more)]], [case], expected, atol=1e-5)


@on(2, False)
@on(2, True)
def stage_0_asks_for_the_search_for_unused_parameters(hybrid: bool) -> None:
    with pytest.raises(RuntimeError, match=r"^this rank has not used .*find_unused_parameters=True"):
        train(0, WHOLE[2], "sgd", find_unused_parameters=False, hybrid=hybrid)
