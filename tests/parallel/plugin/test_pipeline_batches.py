"""Global batches divided over two pipelines of two stages, compared with one process."""

from __future__ import annotations

import math
import os
import signal
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.utils.data import Dataset

from colossal_hetero.colossalai_support.accelerator import get_accelerator  # isort: skip
from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin
from colossal_hetero.common.ranks import is_lost_connection
from colossal_hetero.plugin import uneven_batches
from tests.support.harness import errors_of_the_others, run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import CLASSES, by_labels, tiny_vit
from tests.support.training import train_alone as train_model_alone

SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 40, 16, 2
EPOCHS = 2
RANKS, STAGES = 4, 2


class Images(Dataset):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.images = torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], index % CLASSES


def boosted(**options: Any) -> tuple[Any, ...]:
    """Plugin, booster, model, optimizer and loader."""
    batches = BatchConfig(global_batch_size=GLOBAL_BATCH, **options.pop("batches", {}))
    settings = dict(precision="fp32", microbatch_size=MICRO_BATCH, pp_style="1f1b") | options
    plugin = HeteroHybridParallelPlugin(1, STAGES, batches=batches, **settings)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(Images(), shuffle=True, seed=5)
    model = tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
    return plugin, booster, model, optimizer, loader


def train(division: list[int] | None, slow: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Train with these micro-batches per replica, or with those that follow from times that are set."""
    plugin, booster, model, optimizer, loader = boosted(**options)

    def seconds(elapsed: float, micro_batches: int, stages: int) -> float:
        return 3.0 if plugin.replica()[0] == slow else 1.0

    if division is not None:
        loader.divide_by(
            lambda samples: [[count * MICRO_BATCH] for count in (division if samples == GLOBAL_BATCH else [2, 2])]
        )
    losses, chosen = [], []
    with patch.object(uneven_batches, "micro_batch_seconds", seconds):
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            batches = iter(loader)
            for _ in range(loader.global_batches):
                loss = booster.execute_pipeline(batches, model, by_labels, optimizer, return_loss=True)["loss"]
                losses.append(None if loss is None else loss.item() * loader.current.samples)
                optimizer.step()
                optimizer.zero_grad()
                chosen.append(plugin.replica_micro_batches)
    assert loader.state_dict()["global_batches_done"] == loader.global_batches
    parameters = {name: value.detach().clone() for name, value in model.unwrap().named_parameters()}
    return {"parameters": parameters, "losses": losses, "chosen": chosen}


def train_each(cases: list[tuple[list[int] | None, int | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(*case) for case in cases]


def train_alone() -> tuple[dict[str, Tensor], list[float]]:
    """The parameters after training, and the loss of each global batch, summed over its samples."""
    data, model = Images(), tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    epochs = [torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(5 + epoch)) for epoch in range(EPOCHS)]
    chosen = [each for order in epochs for each in order.split(GLOBAL_BATCH)]
    means = train_model_alone(model, optimizer, [(data.images[each], each % CLASSES) for each in chosen])
    losses = [mean * len(each) for mean, each in zip(means, chosen, strict=True)]
    return {name: value.detach() for name, value in model.named_parameters()}, losses


def assert_equal_to_one_process(
    results: list[dict[str, Any]], what: str, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    expected, losses = train_alone()
    seen: set[str] = set()
    for rank, result in enumerate(results):
        assert result["parameters"], what
        for name, value in result["parameters"].items():
            torch.testing.assert_close(
                value.float(),
                expected[name],
                rtol=rtol,
                atol=atol,
                msg=lambda text, n=name, r=rank: f"{what}, {r}, {n}: {text}",
            )
        seen |= result["parameters"].keys()
    assert seen == expected.keys()
    # The last stage of each pipeline knows the loss of its samples.
    last = [result["losses"] for result in results if result["losses"][0] is not None]
    assert len(last) == RANKS // STAGES
    assert [sum(each) for each in zip(*last, strict=True)] == pytest.approx(losses, rel=rtol)


def test_training_equals_that_of_one_process_and_a_slow_pipeline_gets_fewer_micro_batches() -> None:
    cases: list[Any] = [([5, 3], None, {}), ([6, 2], None, {"zero_stage": 1, "precision": "bf16"})]
    cases += [(None, 0, {}), (None, 1, {}), (None, 0, {"batches": {"method": "uniform"}})]
    given, in_half, *by_speed, uniform = zip(*run_ranks(RANKS, train_each, cases), strict=True)
    assert_equal_to_one_process(list(given), "given")
    assert_equal_to_one_process(list(in_half), "ZeRO in half precision", rtol=0.05, atol=0.02)
    for slow, results in enumerate(by_speed):
        for result in results:
            assert result["chosen"][:2] == [(4, 4)] * 2
            assert result["chosen"][-1] == ((2, 6) if slow == 0 else (6, 2))
        assert_equal_to_one_process(list(results), f"pipeline {slow} is slow")
    assert all(result["chosen"] == [(4, 4)] * 6 for result in uniform)
    assert_equal_to_one_process(list(uniform), "uniform")


def check_loaders() -> None:
    """A loader that another plugin has made is trained with, and a further loader changes nothing that is measured."""
    other = boosted()[0]
    plugin = HeteroHybridParallelPlugin(
        1, STAGES, batches=BatchConfig(global_batch_size=GLOBAL_BATCH), precision="fp32", microbatch_size=MICRO_BATCH
    )
    model, loader = tiny_vit(), other.prepare_dataloader(Images())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, loader, _ = Booster(plugin=plugin).boost(model, optimizer, None, loader)
    Booster(plugin=plugin).execute_pipeline(iter(loader), model, by_labels, optimizer)
    batches: Any = plugin._uneven_batches
    batches._seconds = (1.0, 2.0)
    plugin.prepare_dataloader(Images())
    assert batches._seconds == (1.0, 2.0) and batches._stages == [STAGES, STAGES]


def check_misuse() -> None:
    check_loaders()
    _, booster, model, optimizer, loader = boosted()
    batches = iter(loader)
    booster.execute_pipeline(batches, model, by_labels, optimizer, return_loss=True)
    with pytest.raises(RuntimeError, match="has not stepped since the last execute_pipeline"):
        booster.execute_pipeline(batches, model, by_labels, optimizer, return_loss=True)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():  # a batch of another size
        data = iter([(Images().images[:6], torch.arange(6) % CLASSES)])
        booster.execute_pipeline(data, model, by_labels, return_loss=True)
    model.train()
    booster.execute_pipeline(batches, model, by_labels, optimizer, return_loss=True)
    for options, words in (
        ({"microbatch_size": 3}, "global_batch_size=16 is not a multiple of microbatch_size=3"),
        ({"microbatch_size": 0}, "microbatch_size=0 must be at least 1"),
        ({"num_microbatches": 4}, "num_microbatches differs among pipelines"),
        ({"pp_style": "interleaved"}, "pp_style='interleaved' runs a fixed number"),
        ({"batches": {"method": "flops"}}, 'method="flops" is not available'),
        ({"batches": {"profile": "profile.json"}}, "leave profile out"),
        ({"microbatch_size": 8}, "2 micro-batches are too few for 2 pipelines of 2 stages"),
    ):
        with pytest.raises(ValueError, match=words):
            boosted(**options)
    short = HeteroHybridParallelPlugin(
        1, STAGES, batches=BatchConfig(global_batch_size=12), precision="fp32", microbatch_size=3
    )
    with pytest.raises(ValueError, match=r"the last global batch of an epoch has 4 samples.*drop_last=True"):
        model = tiny_vit()
        Booster(plugin=short).boost(
            model, torch.optim.SGD(model.parameters()), nn.CrossEntropyLoss(), short.prepare_dataloader(Images())
        )


def test_loaders_of_other_plugins_and_what_cannot_be_divided() -> None:
    run_ranks(RANKS, check_misuse)


def train_until_killed(victim: int) -> None:
    _, booster, model, optimizer, loader = boosted()
    batches = iter(loader)
    for step in range(3):
        if step == 1 and torch.distributed.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        booster.execute_pipeline(batches, model, by_labels, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("victim", [0, 3] if IS_THOROUGH else [3])
def test_all_stages_of_all_pipelines_end_if_a_rank_was_killed(victim: int) -> None:
    for words in errors_of_the_others(RANKS, train_until_killed, victim, victim=victim):
        assert is_lost_connection(words)


class LateEvent:
    """An event of a GPU that it passes three events later."""

    recorded: ClassVar[list[LateEvent]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded.append(self)

    def query(self) -> bool:
        return self.recorded[-1] is not self and self.recorded.index(self) < len(self.recorded) - 3

    def elapsed_time(self, other: LateEvent) -> float:
        assert self.query() and other.query()
        # The first step, in which libraries prepare themselves, is not measured.
        return 600.0 if self is self.recorded[0] else 6.0


def train_without_waiting() -> list[float]:
    """Seconds per micro-batch that were known after some steps, in which the host must not wait for its GPU."""
    plugin, booster, model, optimizer, loader = boosted(batches=dict(reallocate_above=math.inf))
    accelerator = type(get_accelerator())
    with (
        patch.object(accelerator, "Event", lambda self, **kwargs: LateEvent(**kwargs), create=True),
        patch.object(accelerator, "synchronize", side_effect=AssertionError("the host waits")),
    ):
        for epoch in range(EPOCHS):
            loader.set_epoch(epoch)
            batches = iter(loader)
            for _ in range(loader.global_batches):
                booster.execute_pipeline(batches, model, by_labels, optimizer, return_loss=True)
                optimizer.step()
                optimizer.zero_grad()
    return list(plugin._uneven_batches._times)


def test_passes_are_timed_without_waiting_for_a_gpu() -> None:
    for times in run_ranks(4, train_without_waiting):
        assert times and all(0 < each < 0.006 for each in times)
