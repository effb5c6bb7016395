"""Training with HeteroZeroPlugin equals that of one process on the same global batches, for any division of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from colossalai.booster import Booster
from torch import nn

from colossal_hetero import HeteroZeroPlugin
from tests.support.harness import run_ranks
from tests.support.training import zero_plugin
from tests.support.zero_runs import (
    SAMPLES,
    Numbered,
    assert_trained,
    full_parameters,
    make_model,
    make_optimizer,
    sizes_by_rank,
    unmeasured,
)

EPOCHS = 2


def boosted(plugin: HeteroZeroPlugin, optimizer_name: str) -> Any:
    """Model, optimizer, criterion, loader and learning-rate schedule, as ``Booster.boost`` returns them."""
    loader = plugin.prepare_dataloader(Numbered(), shuffle=True, seed=11)
    model = make_model()
    optimizer = make_optimizer(model, optimizer_name)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Booster(plugin=plugin).boost(model, optimizer, nn.CrossEntropyLoss(), loader, schedule)


@unmeasured
def train(
    stage: int,
    global_batch_size: int,
    division: list[list[int]],
    optimizer_name: str = "sgd",
    options: dict[str, Any] | None = None,
    user_clip: float = 0.0,
    leaves_early: bool = False,
) -> dict[str, Any]:
    """Train as a script does, which may have left an epoch in the middle of a global batch before. Returns the samples
    of this rank, and the final parameters and learning rate."""
    plugin = zero_plugin(stage, global_batch_size, max_micro_batch=8, **(options or {}))
    model, optimizer, criterion, loader, schedule = boosted(plugin, optimizer_name)
    loader.divide_by(lambda samples: sizes_by_rank(division, samples))
    if leaves_early:
        inputs, targets = next(iter(loader))
        optimizer.backward(criterion(model(inputs), targets))
        optimizer.step()
        schedule.step()
    batches: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            micro_batch = loader.current
            ids = inputs[:, 7].long().tolist() if micro_batch.samples else []
            batches.append([epoch, micro_batch.global_batch, *ids])
            optimizer.zero_grad()
            if plugin.batches.accumulation == "shared":
                # The loop has a collective of its own, as scripts have for their logs. All ranks must reach it.
                torch.distributed.all_reduce(torch.zeros(1))
            loss = criterion(model(inputs), targets)
            optimizer.backward(loss)
            if user_clip:
                optimizer.clip_grad_by_norm(user_clip)
            optimizer.step()
            schedule.step()
    return {"batches": batches, "parameters": full_parameters(model), "lr": optimizer.param_groups[0]["lr"]}


def train_each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Call :func:`train` with the arguments of each case, in the same processes."""
    return [train(**case) for case in cases]


def trained(cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of :func:`train` by case and rank. All cases have the same number of ranks."""
    return list(zip(*run_ranks(len(cases[0]["division"]), train_each, cases), strict=True))


def train_alone(batches: list[list[int]], optimizer_name: str, max_norm: float = 0.0) -> tuple[torch.Tensor, float]:
    """Train one process on these global batches. Returns the final parameters as one vector, and the learning rate."""
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
    """The samples of each global batch in order. Asserts that every sample was used exactly once per epoch."""
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


def check(
    results: list[dict[str, Any]],
    case: dict[str, Any],
    max_norm: float = 0.0,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Assert that the ranks trained like one process, up to the rounding of another order of summation."""
    batches = global_batches(results, case["global_batch_size"])
    expected, rate = train_alone(batches, case.get("optimizer_name", "sgd"), max_norm)
    assert_trained([[torch.cat(result["parameters"])] for result in results], [case], expected, rtol, atol)
    assert [result["lr"] for result in results] == [pytest.approx(rate)] * len(results), case


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_equals_that_of_one_process(ranks: int) -> None:
    cases = [
        dict(stage=stage, global_batch_size=size, division=division)
        for size, division in DIVISIONS.values()
        for stage in (0, 1, 2, 3)
        if len(division) == ranks
    ]
    for case, results in zip(cases, trained(cases), strict=True):
        check(results, case)


def test_training_with_adamw_equals_that_of_one_process() -> None:
    division = [[4, 3], [2, 2]]
    cases = [
        dict(stage=stage, global_batch_size=11, division=division, optimizer_name="adamw") for stage in (0, 1, 2, 3)
    ]
    for case, results in zip(cases, trained(cases), strict=True):
        # AdamW divides by numbers that may be near 0, which amplifies the rounding errors of another order of sums.
        check(results, case, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("by_script", [False, True])
def test_clipping_uses_the_norm_of_the_whole_gradient(by_script: bool) -> None:
    norm = 0.2
    clip: dict[str, Any] = dict(user_clip=norm) if by_script else dict(options={"max_norm": norm})
    cases = [dict(stage=stage, global_batch_size=11, division=[[4, 3], [1, 3]], **clip) for stage in (0, 1, 2, 3)]
    for case, results in zip(cases, trained(cases), strict=True):
        check(results, case, max_norm=norm)


def test_each_rank_can_have_its_own_number_of_micro_batches() -> None:
    divisions = ([[2, 2, 2, 1], [1]], [[1], [2, 2, 2, 1]])
    cases = [
        dict(stage=stage, global_batch_size=8, division=division, options={"accumulation": "per_rank"})
        for stage in (0, 1)
        for division in divisions
    ]
    for case, results in zip(cases, trained(cases), strict=True):
        check(results, case)


def test_half_precision_is_close_to_fp32() -> None:
    cases = [
        dict(stage=stage, global_batch_size=11, division=[[4, 3], [2, 2]], options={"precision": precision, **options})
        for precision, stages, options in (("bf16", (0, 1, 2, 3), {}), ("fp16", (1, 2), {"initial_scale": 2**8}))
        for stage in stages
    ]
    for case, results in zip(cases, trained(cases), strict=True):
        # bfloat16 has 8 bits of precision, so each of the six steps has an error of some thousandths of its size.
        check(results, case, rtol=0.05, atol=0.02)


def test_if_loss_scaling_overflows_all_ranks_skip_the_step() -> None:
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


def test_an_incomplete_global_batch_has_no_effect() -> None:
    cases = [
        dict(stage=stage, global_batch_size=8, division=[[3, 2], [1, 2]], leaves_early=True) for stage in (0, 1, 2, 3)
    ]
    for case, results in zip(cases, trained(cases), strict=True):
        check(results, case)
