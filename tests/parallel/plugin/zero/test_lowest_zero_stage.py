"""What HeteroZeroPlugin does around training: measuring, the profile file, dividing anew, climbing stages, failing."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPModel
from torch import nn

from colossal_hetero import HeteroZeroPlugin
from colossal_hetero.planner.batches.batch_profile import (
    BatchProfile,
    DeviceProfile,
    ModelIdentity,
    TimedBatch,
    save_profile,
)
from colossal_hetero.profiling.batches.rank_profiler import describe
from tests.parallel.plugin.zero.test_zero_plugin import Numbered, full_parameters, make_model, make_optimizer
from tests.support.harness import run_ranks


class Noisy(nn.Module):
    """A model that keeps a record of what it has seen, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.second = nn.Linear(24, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs).view(-1, 6, 4)).flatten(1)
        return self.second(self.drop(torch.relu(hidden)))


def boost(plugin: HeteroZeroPlugin, model: nn.Module, **loader_arguments: Any) -> tuple[Any, Any, Any, Any]:
    loader = plugin.prepare_dataloader(Numbered(), **loader_arguments)
    optimizer = make_optimizer(model, "adamw")
    model, optimizer, criterion, loader, _ = Booster(plugin=plugin).boost(
        model, optimizer, nn.CrossEntropyLoss(), loader
    )
    return model, optimizer, criterion, loader


def randomness() -> list[Any]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def measure_and_look(stage: int) -> None:
    plugin = HeteroZeroPlugin(stage, 8)
    model = Noisy()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = randomness()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    boosted, optimizer, _, loader = boost(plugin, model, shuffle=True)
    assert randomness() == expected
    assert not optimizer.optim.state
    after = full_parameters(boosted)
    parameters = [value for name, value in before.items() if "running" not in name and "num" not in name]
    if stage != 3:
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(value.grad is None for value in boosted.parameters())
    flat = torch.cat([value.flatten() for value in parameters])
    assert torch.equal(torch.cat(after)[: len(flat)], flat)
    assert loader.current is None and loader.state_dict()["global_batches_done"] == 0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measuring_leaves_no_trace(stage: int) -> None:
    run_ranks(2, measure_and_look, stage)


def train_a_little(stage: int, profile: str | None, **options: Any) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    plugin = HeteroZeroPlugin(stage, 8, profile=profile, **options)
    model, optimizer, criterion, loader = boost(plugin, make_model(), shuffle=True)
    for inputs, targets in loader:
        optimizer.backward(criterion(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), [share.sizes for share in plugin.allocation.shares]


def train_twice(path: str) -> None:
    never = float("inf")  # at such sizes speeds are noise, and what is compared is the profile's division
    first, sizes = train_a_little(1, path, reallocate_above=never)
    torch.distributed.barrier()
    written = Path(path).read_text()
    again, same_sizes = train_a_little(1, path, reallocate_above=never)
    assert Path(path).read_text() == written
    assert sizes == same_sizes
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_profile_is_written_and_used_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run_ranks(3, train_twice, str(path))
    content = json.loads(path.read_text())
    assert content["schema"] == 1 and content["stage"] == 1
    assert len(content["ranks"]) == 3
    # A user may edit it: rank 1 is now thought to be much slower, and gets less.
    for kind, slowness in zip(content["kinds"], (1, 5, 1), strict=True):
        for point in kind["points"]:
            point["seconds"] = slowness * point["batch"]
            point["forward_seconds"] = None
    path.write_text(json.dumps(content))
    for _, sizes in run_ranks(3, train_a_little, 1, str(path)):
        assert sum(sizes[1]) < min(sum(sizes[0]), sum(sizes[2]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": "NVIDIA A100"}, "profile is of other devices: rank 0 was NVIDIA A100, now it is cpu"),
        ({"digest": "0123"}, "profile is of another model"),
        ({"stage": 2}, "made at stage 2, not 1"),
        ({"precision": "bf16"}, "made at precision bf16, not fp32"),
    ],
)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "profile.json"
    run_ranks(2, train_a_little, 1, str(path))
    content = json.loads(path.read_text())
    if "devices" in change:
        for kind in content["kinds"]:
            kind["device"] = change["devices"]
    elif "digest" in change:
        content["model"]["digest"] = change["digest"]
    else:
        content.update(change)
    path.write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match=words):
        run_ranks(2, train_a_little, 1, str(path))


def test_a_profile_of_fewer_ranks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    run_ranks(2, train_a_little, 1, str(path))
    with pytest.raises(RuntimeError, match="of 2 ranks, but there are 3"):
        run_ranks(3, train_a_little, 1, str(path))


def profile_of(ranks: int, stage: int, path: Path) -> None:
    """A file that says that each rank takes a second per sample, a quarter of it for forward."""
    points = tuple(TimedBatch(batch=batch, seconds=batch, forward_seconds=batch / 4) for batch in (1, 2, 4, 8))
    kind = DeviceProfile(
        device="cpu",
        memory_bytes=2**30,
        state_bytes=2**20,
        sample_bytes=2**10,
        max_batch=8,
        memory_bound=False,
        points=points,
    )
    described = describe(make_model())
    model = ModelIdentity(
        name=described.name,
        parameters=described.parameters,
        parameter_bytes=0,
        gradient_bytes=0,
        optimizer_bytes=0,
        digest=described.digest,
    )
    profile = BatchProfile(
        stage=stage, precision="fp32", model=model, communication_seconds=0.0, kinds=(kind,), ranks=(0,) * ranks
    )
    save_profile(profile, path)


def change_speed(stage: int, slow: int, path: str, check_every: int | None, bias: float = 1.0) -> dict[str, Any]:
    """Rank ``slow`` says that it is three times slower from the third epoch on, and as fast as before from the
    sixth."""
    plugin = HeteroZeroPlugin(stage, 8, profile=path, check_every=check_every)
    model, optimizer, criterion, loader = boost(plugin, make_model(), shuffle=True)
    assert plugin.batch_balancer is not None
    slowdown = 1.0
    plugin.batch_balancer._timer.take = lambda: [(1, slowdown / 4)] * 3
    seen, samples = [], []
    for epoch in range(8):
        is_slow = torch.distributed.get_rank() == slow
        slowdown = (3.0 if is_slow and 2 <= epoch < 5 else 1.0) * (bias if is_slow else 1.0)
        ids = []
        for inputs, targets in loader:
            ids += inputs[:, 7].long().tolist() if loader.current.samples else []
            optimizer.backward(criterion(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(ids)
        samples.append([share.samples for share in plugin.allocation.shares])
    return {"seen": seen, "samples": samples, "reallocations": plugin.batch_balancer.reallocations}


@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("slow", [0, 1])
def test_batches_follow_a_change_of_speed(stage: int, slow: int, check_every: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile_of(2, stage, path)
    results = run_ranks(2, change_speed, stage, slow, str(path), check_every)
    fitted = [6, 6]
    fitted[slow] = 2
    for result in results:
        assert [result["samples"][epoch] for epoch in (1, 4, 7)] == [[4, 4], fitted, [4, 4]]
        assert result["reallocations"] >= 2
    for epoch in range(8):
        assert sorted(results[0]["seen"][epoch] + results[1]["seen"][epoch]) == list(range(len(Numbered())))


@pytest.mark.parametrize("slow", [0, 1])
def test_a_little_that_training_differs_from_measuring_by_is_no_change(slow: int, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile_of(2, 1, path)
    fitted = [6, 6]
    fitted[slow] = 2
    for result in run_ranks(2, change_speed, 1, slow, str(path), None, 1.2):
        assert [result["samples"][epoch] for epoch in (1, 4, 7)] == [[4, 4], fitted, [4, 4]]
    # Much is one, from the first look on.
    for result in run_ranks(2, change_speed, 1, slow, str(path), None, 3.0):
        assert result["samples"][1] == fitted


def test_three_ranks_that_slow_down_alike_keep_their_batches(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile_of(3, 1, path)
    for result in run_ranks(3, change_speed, 1, 7, str(path), None):
        assert result["reallocations"] == 0


def fail_on(rank: int) -> None:
    def training_step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == rank:
            raise KeyError("no such column")
        return criterion(model(batch[0]), batch[1])

    boost(HeteroZeroPlugin(1, 8, training_step=training_step), make_model())


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_fails_while_measuring_ends_all(rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"rank {rank}: KeyError: 'no such column'"):
        run_ranks(3, fail_on, rank, timeout_seconds=60)


class Wide(nn.Module):
    """Parameters of 64 MiB in layers of 4 MiB, so that sharding them matters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))
        self.last = nn.Linear(1024, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.first(inputs)
        for layer in self.layers:
            outputs = torch.relu(layer(outputs))
        return self.last(outputs)


def climb(more_mib: list[int], stage: int | str) -> None:
    """Train with so much more address space than is used before the model is there, by rank."""
    rank = torch.distributed.get_rank()
    plugin = HeteroZeroPlugin(stage, 8, max_micro_batch=4)
    warm = nn.Linear(1024, 1024)
    warm(torch.randn(64, 1024)).sum().backward()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_mib[rank] * 2**20, resource.RLIM_INFINITY))
    model, optimizer, criterion, loader = boost(plugin, Wide())
    for inputs, targets in loader:
        optimizer.backward(criterion(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def climb_above(highest: int, stage: int | str, precision: str) -> tuple[int, torch.Tensor]:
    """Train where the second rank pretends to have no room up to stage ``highest``."""
    plugin = HeteroZeroPlugin(stage, 8, precision=precision)

    def training_step(model: nn.Module, criterion: Any, batch: Any) -> torch.Tensor:
        loss = criterion(model(batch[0]), batch[1])
        if torch.distributed.get_rank() == 1 and stage_of(model) <= highest:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return loss

    plugin.batches = dataclasses.replace(plugin.batches, training_step=training_step)
    torch.manual_seed(0)
    model, optimizer, criterion, loader = boost(plugin, make_model())
    loader.divide_by(lambda samples: [[samples - 1], [1]])
    for inputs, targets in loader:
        optimizer.backward(criterion(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(plugin.stage, int)
    return plugin.stage, torch.cat(full_parameters(model))


def stage_of(model: nn.Module) -> int:
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        return 0
    return 3 if isinstance(model, TorchFSDPModel) else 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("highest", "expected"), [(-1, 0), (0, 1), (1, 3)])
def test_auto_takes_the_first_stage_that_fits_on_all(highest: int, expected: int, precision: str) -> None:
    # What is tried at stages 1 and 2 looks alike from the model: both fail or none does.
    climbed = run_ranks(2, climb_above, highest, "auto", precision)
    straight = run_ranks(2, climb_above, -1, expected, precision)
    for (stage, parameters), (_, wanted) in zip(climbed, straight, strict=True):
        assert stage == expected
        # Whatever was tried before has left nothing behind.
        assert torch.equal(parameters, wanted)


def test_a_model_that_fits_nowhere_says_so_on_all_ranks() -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 1 \(cpu.*not enough memory for one sample at any of the stages 0, 1, 2, 3"
    ):
        run_ranks(2, climb, [2000, 80], "auto", timeout_seconds=60)
    with pytest.raises(RuntimeError, match=r'rank 0 \(cpu.*at stage 1; try stage="auto"'):
        run_ranks(2, climb, [150, 2000], 1, timeout_seconds=60)
