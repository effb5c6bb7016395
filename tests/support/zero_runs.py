"""What tests of ZeRO with uneven batches share: numbered samples, a small model, one training loop, and references."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from colossalai.booster import Booster
from colossalai.shardformer.policies.base_policy import Policy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, default_collate

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin
from colossal_hetero.data_parallel import attach
from colossal_hetero.planner.batches.batch_profile import BatchProfile, DeviceProfile, ModelIdentity, TimedBatch
from colossal_hetero.profiling.rank_profiler import ModelDescription
from tests.support.training import train_alone, zero_plugin

SAMPLES = 29


def equal_devices(
    _: Any,
    model: ModelDescription,
    *,
    stage: int,
    replica_of: Sequence[int],
    precision: str = "fp32",
    cap: int = 8,
    multiple_of: int = 1,
    **__: Any,
) -> BatchProfile:
    """The profile of devices that take a second per sample, without measuring."""
    sizes = range(multiple_of, max(cap, multiple_of) + 1, multiple_of)
    kind = DeviceProfile(
        device="cpu",
        memory_bytes=2**30,
        state_bytes=2**20,
        sample_bytes=2**10,
        max_batch=sizes[-1],
        memory_bound=False,
        points=tuple(TimedBatch(batch=size, seconds=size) for size in sizes),
    )
    size = dict(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    identity = ModelIdentity(name=model.name, parameters=model.parameters, digest=model.digest, **size)
    replicas = max(replica_of) + 1
    return BatchProfile(
        stage=stage,
        precision=precision,
        model=identity,
        communication_seconds=0.0,
        kinds=(kind,) * replicas,
        ranks=tuple(range(replicas)),
    )


BATCHES = {each.name for each in dataclasses.fields(BatchConfig)}
CRITERION = nn.CrossEntropyLoss()

unmeasured = patch.object(attach, "profile_ranks", equal_devices)
"""Decorates a function that ranks run. Measuring before training would take most of its time."""


class Numbered(Dataset):
    """Samples that contain their number, so that a test knows which rank trained on which samples."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(samples, 7, generator=generator)
        self.targets = torch.randint(3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat([self.inputs[index], torch.tensor([float(index)])]), self.targets[index]


class Net(nn.Module):
    """A model whose sizes cannot be divided evenly among the ranks."""

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
    """The ``division`` of a full global batch, or for fewer ``samples`` its first ones, in as many micro-steps."""
    left, result = samples, []
    for sizes in division:
        kept = []
        for size in sizes:
            kept.append(min(size, left))
            left -= kept[-1]
        result.append(kept)
    return result


class Unchanged(Policy):
    """Colossal-AI's hybrid plugin needs a policy for a model; this one changes nothing."""

    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict[Any, Any]:
        return {}

    def postprocess(self) -> nn.Module:
        return self.model


class Boosted(NamedTuple):
    plugin: Any
    booster: Booster
    model: Any
    optimizer: Any
    criterion: Any
    loader: Any
    schedule: Any

    def divide(self, division: list[list[int]]) -> None:
        self.loader.divide_by(lambda samples: sizes_by_rank(division, samples))

    def fit(self, *loss_of: Callable[[nn.Module, Any], Tensor]) -> Tensor:
        """Train an epoch as a usual script does, with another loss than :func:`loss_of` if it is given."""
        return fit(self.model, self.optimizer, self.loader, *loss_of)


def boosted(
    kind: int | str,
    model: nn.Module | None = None,
    optimizer: Any = "sgd",
    data: Dataset | None = None,
    *,
    samples: int = 8,
    criterion: Any = CRITERION,
    division: list[list[int]] | None = None,
    loader: Mapping[str, Any] = {},
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    **options: Any,
) -> Boosted:
    """Boost for global batches of ``samples``. ``kind``: a stage of ZeRO, "auto", or "hybrid" for the hybrid plugin
    with uneven batches. ``optimizer``: one of :func:`make_optimizer`, by name, or a function that makes one for a
    model, or an optimizer. ``loader``: options of ``prepare_dataloader``. ``division``: of a full global batch,
    instead of the plugin's."""
    plugin: Any
    if kind == "hybrid":
        fields = {name: options.pop(name) for name in BATCHES & options.keys()}
        batches = BatchConfig(global_batch_size=samples, **fields)
        plugin = HeteroHybridParallelPlugin(
            1, 1, batches=batches, precision="fp32", custom_policy=Unchanged(), **options
        )
    else:
        plugin = zero_plugin(kind, samples, **options)
    model = make_model() if model is None else model
    if isinstance(optimizer, str):
        optimizer = make_optimizer(model, optimizer)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model)
    booster, prepared = Booster(plugin=plugin), plugin.prepare_dataloader(data or Numbered(), **loader)
    made = None if schedule is None else schedule(optimizer)
    run = Boosted(plugin, booster, *booster.boost(model, optimizer, criterion, prepared, made))
    if division is not None:
        run.divide(division)
    return run


def full_parameters(model: nn.Module) -> list[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDP):
            with FSDP.summon_full_params(module):
                return [value.detach().clone().flatten().float() for value in module.module.parameters()]
    return [value.detach().clone().flatten().float() for value in model.parameters()]


def flat(model: nn.Module) -> Tensor:
    """All parameters of the model in one vector, on every rank. FSDP pads them with zeros."""
    return torch.cat(full_parameters(model))


def global_batches(data: Any, size: int) -> list[Any]:
    return [
        default_collate([data[index] for index in range(first, min(first + size, len(data)))])
        for first in range(0, len(data), size)
    ]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def fit(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor] = loss_of,
    max_norm: float = 0.0,
    schedule: Any = None,
) -> Tensor:
    """The parameters after training as a usual script does, boosted or in one process."""
    train_alone(model, optimizer, batches, loss_of, max_norm, schedule)
    return flat(model)


def assert_trained(
    results: Iterable[Sequence[Tensor]],
    cases: Sequence[Any],
    expected: Tensor | Sequence[Tensor],
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Assert that the parameters, by rank and case, are those that are expected: of all cases, or by case."""
    for rank, found in enumerate(results):
        for number, (case, parameters) in enumerate(zip(cases, found, strict=True)):
            wanted = expected if isinstance(expected, Tensor) else expected[number]
            torch.testing.assert_close(
                parameters[: len(wanted)],
                wanted,
                rtol=rtol,
                atol=atol,
                msg=lambda text, what=f"{case}, rank {rank}": f"{what}: {text}",
            )
