"""Training with HeteroZeroPlugin equals that of one process on the same global batches, for any division of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.zero_runs import (
    SAMPLES,
    Numbered,
    assert_trained,
    boosted,
    fit,
    full_parameters,
    make_model,
    make_optimizer,
    unmeasured,
)

EPOCHS = 2


def make_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


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
    run = boosted(
        *(stage, None, optimizer_name),
        samples=global_batch_size,
        division=division,
        loader=dict(shuffle=True, seed=11),
        schedule=make_schedule,
        max_micro_batch=8,
        **(options or {}),
    )
    plugin, _, model, optimizer, criterion, loader, schedule = run
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


def train_alone(batches: list[list[int]], optimizer_name: str, max_norm: float = 0.0) -> tuple[torch.Tensor, float]:
    """Train one process on these global batches. Returns the final parameters as one vector, and the learning rate."""
    data, model = Numbered(), make_model()
    optimizer = make_optimizer(model, optimizer_name)
    collated = [default_collate([data[index] for index in batch]) for batch in batches]
    parameters = fit(model, optimizer, collated, max_norm=max_norm, schedule=make_schedule(optimizer))
    return parameters, optimizer.param_groups[0]["lr"]


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


DIVISIONS: dict[int, list[tuple[int, list[list[int]]]]] = {
    2: [
        (8, [[7], [1]]),
        (8, [[1], [7]]),
        (5, [[5], [0]]),
        (5, [[0], [5]]),
        (11, [[4, 3], [2, 2]]),
        (8, [[3, 2, 1], [1, 1, 0]]),
    ],
    3: [(8, [[5], [1], [2]]), (11, [[2, 1], [3, 0], [1, 4]])],
    4: [(11, [[1], [4], [0], [6]])],
}
"""By number of ranks: samples of a global batch, and sizes of the micro-batches of each rank."""
NORM = 0.2
# AdamW divides by numbers that may be near 0, which amplifies the rounding errors of another order of sums.
ADAMW = dict(rtol=1e-3, atol=1e-4)
# bfloat16 has 8 bits of precision, so each of the six steps has an error of some thousandths of its size.
HALF = dict(rtol=0.05, atol=0.02)


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


Case = tuple[dict[str, Any], dict[str, float]]
"""Arguments of :func:`train`, and the norm that one process clips to and tolerances."""


def cases_on(ranks: int) -> list[Case]:
    """Without ``thorough``, each division at two stages, or at one on four ranks."""
    cases: list[Case] = [
        (dict(stage=stage, global_batch_size=size, division=division), {})
        for number, (size, division) in enumerate(DIVISIONS[ranks])
        for stage in (0, 1, 2, 3)
        if IS_THOROUGH or (stage - number) % (2 if ranks < 4 else 4) == 0
    ]
    if ranks > 2:
        return cases
    more: list[tuple[tuple[int, ...], dict[str, Any], dict[str, float]]] = [
        ((0, 1, 2, 3), dict(optimizer_name="adamw"), ADAMW),
        ((0, 2), dict(options={"max_norm": NORM}), dict(max_norm=NORM)),
        ((1, 3), dict(options={"max_norm": NORM}, optimizer_name="adamw"), dict(max_norm=NORM, **ADAMW)),
        ((0, 1, 2, 3), dict(user_clip=NORM), dict(max_norm=NORM)),
        ((0, 1, 2, 3), dict(options={"precision": "bf16"}), HALF),
        ((1, 2), dict(options={"precision": "fp16", "initial_scale": 2**8}), HALF),
        ((0, 1, 2, 3), dict(division=[[3, 2], [1, 2]], global_batch_size=8, leaves_early=True), {}),
        # Each rank has its own number of micro-batches.
        *(
            (stages, dict(division=each, global_batch_size=8, options={"accumulation": "per_rank"}), {})
            for stages, each in (((0,), [[2, 2, 2, 1], [1]]), ((1,), [[1], [2, 2, 2, 1]]))
        ),
    ]
    usual = dict(global_batch_size=11, division=[[4, 3], [2, 2]])
    return cases + [(usual | dict(stage=stage) | case, limits) for stages, case, limits in more for stage in stages]


@unmeasured
def train_each(cases: list[Case]) -> list[dict[str, Any]]:
    return [train(**case) for case, _ in cases]


@pytest.mark.parametrize("ranks", DIVISIONS)
def test_training_equals_that_of_one_process(ranks: int) -> None:
    """Also with an incomplete global batch before, which has no effect."""
    cases = cases_on(ranks)
    for (case, limits), results in zip(cases, zip(*run_ranks(ranks, train_each, cases), strict=True), strict=True):
        check(list(results), case, **limits)


def test_training_after_measuring_equals_that_of_one_process() -> None:
    case = dict(stage=1, global_batch_size=11, division=[[4, 3], [2, 2]])
    check(run_ranks(2, train, *case.values()), case)


def test_if_loss_scaling_overflows_all_ranks_skip_the_step() -> None:
    scale = {"initial_scale": 2.0**40, "max_scale": 2.0**40, "hysteresis": 1, "backoff_factor": 0.5}
    first, second = run_ranks(2, train, 1, 11, [[4, 3], [2, 2]], "sgd", {"precision": "fp16", **scale})
    for one, other in zip(first["parameters"], second["parameters"], strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
