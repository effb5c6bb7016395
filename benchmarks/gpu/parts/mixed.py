"""One rank with a GPU and several with a CPU in one job, over Gloo."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from benchmarks.common import take_turns

# isort: split
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.parts.profile import Work, host_bytes_per_second, measure_layers, two_devices
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.vit_training import Shape
from benchmarks.pipeline.trained import Trained
from benchmarks.plans import price_ranks
from colossal_hetero import BatchConfig, HeteroZeroPlugin
from colossal_hetero.cli.probe_ranks import measure_links
from colossal_hetero.planner.batches.batch_profile import load_profile
from colossal_hetero.planner.cluster.topology import MeasuredLink
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.report.batch_report import compare

GIB = 2**30
CLASSES = 10
STAGES = (0, 1, 2)


@dataclass(frozen=True)
class Job:
    """What is trained."""

    shape: Shape
    """Its batch is the global batch."""
    max_micro_batch: int
    global_batches: int
    """The first two are not timed."""


@dataclass(frozen=True)
class Outcome:
    """What a rank reports; all report the same."""

    losses: list[float]
    """Mean over the samples of each global batch."""
    seconds: float
    """Mean of a global batch."""
    shares: list[int]
    """Samples of a global batch, by rank."""
    links: list[MeasuredLink]


# Data parallelism ----------------------------------------------------------------------------------------------------


def train(device: torch.device, job: Job, stage: int, profile: str) -> Outcome:
    """Train on batches that fit the speed of each rank, after measuring it, and measure the links."""
    torch.backends.cudnn.allow_tf32 = False  # for the loss, which is compared
    model = job.shape.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plugin = HeteroZeroPlugin(
        stage,
        batches=BatchConfig(
            global_batch_size=job.shape.batch,
            profile=profile,
            max_micro_batch=job.max_micro_batch,
            reallocate_above=float("inf"),
        ),
    )
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(_data(job))
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, F.cross_entropy, loader)
    parts: list[tuple[int, float]] = []
    begins: dict[int, float] = {}
    for images, labels in loader:
        current = loader.current
        if current.global_batch not in begins:
            get_accelerator().synchronize()
            begins[current.global_batch] = time.perf_counter()
        loss = criterion(model(images.to(device)), labels.to(device))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        parts.append((current.global_batch, loss.item() * current.samples / current.global_samples))
    get_accelerator().synchronize()
    seconds = (time.perf_counter() - begins[2]) / (job.global_batches - 2)
    everyone: list[list[tuple[int, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, parts)
    losses = [
        sum(part for of_rank in everyone for number, part in of_rank if number == global_batch)
        for global_batch in range(job.global_batches)
    ]
    shares = [share.samples for share in plugin.allocation.shares]
    pairs = [[pair] for pair in combinations(range(dist.get_world_size()), 2)]
    return Outcome(losses, seconds, shares, measure_links(pairs, "gloo", torch.device("cpu")))


def _data(job: Job) -> TensorDataset:
    """As many samples as are needed, all different."""
    count, size = job.shape.batch * job.global_batches, job.shape.image
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 3, size, size, generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (count,), generator=generator))


def data_parallel(machine: Machine, job: Job, devices: tuple[str, ...], stage: int) -> list[Row]:
    """All devices, then the first alone, then those that remain when devices are dropped that do not pay."""
    with tempfile.TemporaryDirectory() as folder:

        def run(ranks: Sequence[int]) -> tuple[Outcome, Path]:
            path = Path(folder) / f"{len(ranks)}.json"
            used = tuple(devices[rank] for rank in ranks)
            trained = run_ranks(
                machine, len(used), train, job, stage, str(path), devices=used, backend="gloo", seconds=240.0
            )
            return trained[0], path

        everyone = tuple(range(len(devices)))
        together, path = run(everyone)
        alone, _ = run((0,))
        profile = load_profile(path).model_copy(update={"links": tuple(together.links)})
        plan = compare(profile, job.shape.batch, stage=stage, method="adapt").adapt
        assert plan is not None
        kept = tuple(sorted(plan.ring))
        # Ranks with the same devices train alike.
        known = {devices: together, devices[:1]: alone}
        chosen = known.get(tuple(devices[rank] for rank in kept)) or run(kept)[0]
    dropped = f"without {', '.join(devices[rank] for rank in plan.dropped)}" if plan.dropped else "nothing is dropped"
    return [
        _row("all devices", together, alone, ""),
        _row("the first alone", alone, alone, ""),
        _row("after dropping", chosen, alone, f"{dropped}; {plan.cost_seconds * 1e3:.1f} ms predicted"),
    ]


def _row(what: str, trained: Outcome, alone: Outcome, note: str) -> Row:
    difference = max(abs(a - b) / abs(b) for a, b in zip(trained.losses, alone.losses, strict=True))
    shares = ", ".join(map(str, trained.shares))
    return (
        what,
        shares,
        f"{trained.seconds * 1e3:.1f}",
        f"{trained.seconds / alone.seconds:.3f}",
        f"{difference:.1e}",
        note,
    )


# A pipeline ----------------------------------------------------------------------------------------------------------


def train_pipeline(device: torch.device, work: Work) -> tuple[list[float] | None, float, list[int]]:
    """Train a pipeline whose layers are divided by the ranks' measured speed: losses, seconds, layers by stage.

    Only the last stage knows the losses.
    """
    torch.backends.cudnn.allow_tf32 = False  # for the loss, which is compared
    profile = measure_layers(device, work, "fp32")
    bytes_per_second = host_bytes_per_second(device, work.shape.activation_bytes)
    topology = as_profiled(two_devices(profile, bytes_per_second), profile)
    sizes = {"micro_batch": work.shape.batch, "global_batch": work.global_batch}
    cuts = [(0, cut, profile.blocks) for cut in range(1, profile.blocks)]
    plans = [price_ranks(topology, profile, [[[0], [1]]], bounds=cut, **sizes) for cut in cuts]
    plan = min(plans, key=lambda each: each.iteration_seconds)
    run = Trained(plan, work.shape.build(), batch=work.shape.samples(device, work.micro_batches))
    take_turns([run], 0, 1, work.iterations)
    return run.losses or None, run.median_seconds, list(plan.layers_per_stage)


def reference_losses(work: Work) -> list[float]:
    """Losses of one process with the same batches, on the CPU."""
    model, (images, labels) = work.shape.build(), work.shape.samples(torch.device("cpu"), work.micro_batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(1 + work.iterations):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pipeline(machine: Machine, work: Work, devices: tuple[str, ...]) -> list[Row]:
    ranks = run_ranks(machine, 2, train_pipeline, work, devices=devices, backend="gloo", seconds=240.0)
    losses = next(found for found, _, _ in ranks if found is not None)
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, reference_losses(work), strict=True))
    _, seconds, layers = ranks[0]
    cells = (", ".join(map(str, layers)), f"{seconds * 1e3:.1f}", "", f"{difference:.1e}")
    return [(f"stages on {' and '.join(devices)}", *cells, "layers of each stage, by measured speed")]


# The part ------------------------------------------------------------------------------------------------------------


def cases(machine: Machine) -> Sequence[Case]:
    shape = Shape(width=256, depth=4, heads=4, image=32, patch=4, batch=128)
    job = Job(shape, max_micro_batch=32, global_batches=12)
    work = Work(Shape(256, 6, 4, 32, 4, batch=8), micro_batches=4, profile_seconds=1.0, iterations=5)
    first = "cuda:0" if machine.gpus else "cpu"
    devices = (first, "cpu", "cpu", "cpu", "cpu")
    stages: tuple[int, ...] = STAGES
    if machine.is_tiny:
        job = Job(Shape(32, 2, 4, 8, 4, batch=4), max_micro_batch=2, global_batches=3)
        work = Work(Shape(32, 2, 4, 8, 4, batch=2), micro_batches=2, profile_seconds=0.05, iterations=1)
        devices, stages = devices[:2], (2,)
    at_stage = partial(data_parallel, machine, job, devices)
    return [
        *(Case(f"HeteroZeroPlugin, stage {each}", partial(at_stage, each), 4 * GIB) for each in stages),
        Case("planned pipeline", partial(pipeline, machine, work, devices[:2]), 4 * GIB),
    ]


PART = Part(
    name="mixed",
    about="""
One rank has the GPU, the others have a CPU core each; the tensors of the GPU go through the host. *HeteroZeroPlugin*
divides the global batch of 128 images by measured speed. Then the links are measured, and devices are dropped as long
as that is predicted to save time (ADAPT); what remains is trained again. Aims: the loss of each global batch differs
from that of the GPU alone by less than 1e-4, and what remains after dropping takes at most 1.02 times as long as the
GPU alone. *Planned pipeline*: the layers of a ViT are divided over the GPU and a CPU by measured speed; the loss is
compared with that of one process on the CPU.
""",
    columns=("case", "what", "samples or layers", "iteration [ms]", "/ GPU alone", "difference of loss", "note"),
    cases=cases,
)
