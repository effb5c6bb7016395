"""Planning with the times of a real GPU: probe it, profile a model, plan, train, and compare."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common import take_turns

# isort: split
from colossalai.accelerator import get_accelerator

from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.vit_training import Shape, shape_for
from benchmarks.pipeline.trained import Trained
from benchmarks.plans import price_ranks, simple_plan
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.colossalai_support.gpu_over_gloo import support_gpus_over_gloo
from colossal_hetero.layers.transport import Transport
from colossal_hetero.planner.cluster.cluster_file import load_cluster, save_cluster
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.profiling.layer_profiler import profile_layers

GIB = 2**30
MESSAGES = 5


@dataclass(frozen=True)
class Work:
    """A model, its batches, and how long it is measured."""

    shape: Shape
    """The model and its micro-batch."""
    micro_batches: int
    """Of a global batch."""
    profile_seconds: float
    iterations: int

    @property
    def global_batch(self) -> int:
        return self.shape.batch * self.micro_batches


def measure_layers(device: torch.device, work: Work, precision: str) -> ModelProfile:
    """The times of the layers on this rank's device, while all ranks measure."""
    return profile_layers(
        work.shape.build().to(device),
        work.shape.samples(device),
        F.cross_entropy,
        micro_batches=[work.shape.batch],
        optimizer="adamw",
        precision=precision,
        min_seconds=work.profile_seconds,
    ).profile


def train(device: torch.device, work: Work, plan: Plan, precision: str) -> float:
    """Median seconds of an iteration, with the optimizer's step."""
    run = Trained(plan, work.shape.build(), batch=work.shape.samples(device, work.micro_batches), precision=precision)
    take_turns([run], 1, 1, work.iterations)
    return run.median_seconds


# One GPU -------------------------------------------------------------------------------------------------------------


def planned_alone(device: torch.device, work: Work, precision: str) -> tuple[Topology, Plan, float]:
    """What is probed, the best plan for it, and the measured seconds of an iteration of the plan."""
    topology, _, _ = probe_ranks(device)
    with tempfile.TemporaryDirectory() as folder:
        save_cluster(topology, Path(folder) / "cluster.toml", "")
        topology = load_cluster(Path(folder) / "cluster.toml")
    profile = measure_layers(device, work, precision)
    best = simple_plan(topology, profile, global_batch=work.global_batch, micro_batches=[work.shape.batch])
    return topology, best, train(device, work, best, precision)


def one_device(machine: Machine, work: Work, precision: str) -> list[Row]:
    topology, plan, measured = run_ranks(machine, 1, planned_alone, work, precision)[0]
    kind = topology.devices[0].kind
    device = f"{kind.name}, {kind.memory_bytes / GIB:.1f} GiB, {kind.flops / 1e12:.3g} TFLOP/s"
    return [_row("the best plan", plan.iteration_seconds, measured, device)]


# Two stages on one GPU -----------------------------------------------------------------------------------------------


def host_bytes_per_second(device: torch.device, size_bytes: int) -> float:
    """How fast two ranks send each other messages of that size at once, median over a few."""
    support_gpus_over_gloo()
    transport = Transport(dist.group.WORLD)
    transport.connect(device)
    other = 1 - transport.rank
    sent, received = (torch.ones(size_bytes // 4, device=device) for _ in range(2))
    seconds = []
    for _ in range(1 + MESSAGES):
        dist.barrier()
        begin = time.perf_counter()
        transport.exchange([(other, sent)], [(other, received)]).wait()
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - begin)
    slowest = [0.0, 0.0]
    dist.all_gather_object(slowest, median(seconds[1:]))
    return size_bytes / max(slowest)


def two_devices(profile: ModelProfile, bytes_per_second: float) -> Topology:
    """A machine with the two devices that were profiled, or with two of the one that was."""
    names = profile.rank_devices * (2 // len(profile.rank_devices))
    first, second = (Device(DeviceKind(name, 1 << 40, 1e12), 0, 0) for name in names)
    node = Node("node", 0, (0, 1), Channel("host memory", bytes_per_second), ())
    return Topology((first, second), (node,), ("here",))


def staged(device: torch.device, work: Work, alone: ModelProfile) -> tuple[list[float], float]:
    """Predicted and measured seconds of an iteration of two stages.

    It is predicted from layers that one rank measured alone, as if each stage had a device of its own, and from layers
    that both ranks measured at the same time.
    """
    bytes_per_second = host_bytes_per_second(device, work.shape.activation_bytes)
    plans = []
    for profile in (alone, measure_layers(device, work, "fp32")):
        plan = price_ranks(
            as_profiled(two_devices(profile, bytes_per_second), profile),
            profile,
            [[[0], [1]]],
            micro_batch=work.shape.batch,
            global_batch=work.global_batch,
        )
        plans.append(plan)
    return [simulate_plan(plan).seconds for plan in plans], train(device, work, plans[0], "fp32")


def two_stages(machine: Machine, work: Work) -> list[Row]:
    (alone,) = run_ranks(machine, 1, measure_layers, work, "fp32")
    (separate, shared), measured = run_ranks(machine, 2, staged, work, alone)[0]
    where = "a GPU each" if machine.gpus > 1 else "one device, shared"
    return [
        _row("two stages, layers measured alone", separate, measured, where),
        _row("two stages, layers measured by both at once", shared, measured, where),
    ]


def _row(what: str, predicted: float, measured: float, note: str) -> Row:
    return what, f"{predicted * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{predicted / measured - 1:+.1%}", note


# The commands --------------------------------------------------------------------------------------------------------


def commands(machine: Machine) -> list[Row]:
    """``probe``, ``profile`` and ``plan`` as users run them, with all GPUs."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (
            ["probe", "--out", "cluster.toml"],
            [
                *("profile", "--model", "timm:vit_base_patch16_224", "--micro-batch", "8", "--precision", "bf16"),
                *("--out", "profile.json"),
            ],
            ["plan", "cluster.toml", "profile.json", "--global-batch", str(64 * machine.gpus), "--out", "plan.json"],
        ):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "colossal_hetero.cli.main", *arguments]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{arguments[0]}: {done.stderr.strip().splitlines()[-1:]}")
            seconds = time.perf_counter() - begin
            rows.append((f"colossal-hetero {arguments[0]}", "", f"{seconds * 1e3:.0f}", "", "the whole command"))
    return rows


# The part ------------------------------------------------------------------------------------------------------------


def cases(machine: Machine) -> Sequence[Case]:
    shape = shape_for(machine, Shape(width=1024, depth=12, heads=16, image=224, patch=16, batch=8))
    work = Work(shape, micro_batches=8, profile_seconds=3.0, iterations=10)
    precisions: tuple[str, ...] = ("fp32", "bf16")
    if machine.is_tiny:
        work = Work(shape, micro_batches=2, profile_seconds=0.05, iterations=1)
        precisions = ("fp32",)
    return [
        *(Case(f"one device, {each}", partial(one_device, machine, work, each), 8 * GIB) for each in precisions),
        Case("two stages", partial(two_stages, machine, work), 16 * GIB),
        Case("commands", partial(commands, machine), 8 * GIB, gpus=1),
    ]


PART = Part(
    name="profile",
    about="""
*One device* is probed; the layers of a ViT of 151 million parameters are measured on it; the best plan is made from
both, and trained. Aim: the prediction is within 5 % of the measured iteration. *Two stages* of a pipeline are trained
in the same way, each by a rank of its own. With one GPU they share it over Gloo, as a shared card: both stages compute
at the same time for a part of the iteration only, so the measured time must lie between the prediction from layers that
were measured alone (no sharing) and from layers that both ranks measured at once (always sharing). *Commands*:
`probe`, `profile` and `plan` as users run them.
""",
    columns=("case", "what", "predicted [ms]", "measured [ms]", "error", "note"),
    cases=cases,
)
