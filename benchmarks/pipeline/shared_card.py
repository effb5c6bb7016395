"""Predicted and measured iteration time of pipelines that share the network cards of two nodes.

The nodes are network namespaces on this machine, joined by cards of limited bandwidth (token bucket filters). Ranks are
processes that train a ViT over Gloo with Colossal-AI's 1F1B schedule. Two placements are trained:

- *spread*: the first stages are in the one node and the second stages in the other. All activations and gradients of
  activations cross the cards, those of all replicas at the same time; weight gradients stay inside the nodes.
- *inside*: each pipeline is inside a node. Only weight gradients cross the cards, those of both stages at once.

Layers are measured first, by all ranks at the same time, so that they share the processor's cores as in training. The
predictions are those of ``colossal-hetero plan`` and ``simulate``: the formula, and the simulation with blocking
and with overlapped transfers (Gloo sends while the sender computes).

    sudo python -m benchmarks.pipeline.shared_card [--replicas 2,4] [--megabits 60] [--rounds 5]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)
from benchmarks.common import print_table
from benchmarks.pipeline.namespace_ranks import run_in_namespaces
from benchmarks.pipeline.namespaces import missing, nodes, payload_bytes_per_second
from benchmarks.plans import price_ranks

# isort: split
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.fitted_profiles import as_profiled
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.profiling.layer_profiler import profile_layers

PLACEMENTS = ("spread", "inside")
LOOPBACK_BYTES_PER_SECOND = 1e9
IMAGE, PATCH, HEADS = 32, 4, 4
BURST = "16kb"
"""Much less than a message, and enough for the low rates here."""


@dataclass(frozen=True)
class Outcome:
    """A placement's predictions and measured iterations, in seconds."""

    closed_form: float
    blocking: float
    overlapped: float
    measured: float


def machines(replicas: int, megabits: float) -> Topology:
    """Two nodes; each has a device per replica."""
    kind = DeviceKind("cpu", 4 << 30, 1e11)
    inside = Channel("loopback", LOOPBACK_BYTES_PER_SECOND)
    card = (Channel("Ethernet", payload_bytes_per_second(megabits)),)
    return Topology(
        tuple(Device(kind, node, 0) for node in range(2) for _ in range(replicas)),
        tuple(Node(f"node-{n}", 0, tuple(range(n * replicas, (n + 1) * replicas)), inside, card) for n in range(2)),
        ("here",),
    )


def ranks_of(placement: str, replicas: int) -> list[list[list[int]]]:
    """Ranks by replica, stage and place in the tensor-parallel group."""
    if placement == "spread":
        return [[[replica], [replicas + replica]] for replica in range(replicas)]
    return [[[2 * replica], [2 * replica + 1]] for replica in range(replicas)]


def build_model(arguments: argparse.Namespace) -> VisionTransformer:
    torch.manual_seed(1)
    return VisionTransformer(
        img_size=IMAGE,
        patch_size=PATCH,
        embed_dim=arguments.hidden,
        depth=arguments.blocks,
        num_heads=HEADS,
        num_classes=10,
        class_token=False,
        global_pool="avg",
    )


def make_batch(samples: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(samples, 3, IMAGE, IMAGE, generator=generator),
        torch.randint(0, 10, (samples,), generator=generator),
    ]


def loss(outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(outputs, batch[1])


def measured_profile(arguments: argparse.Namespace) -> ModelProfile:
    """Layer times while all ranks compute."""
    return profile_layers(
        build_model(arguments),
        tuple(make_batch(arguments.micro_batch)),
        F.cross_entropy,
        micro_batches=[arguments.micro_batch],
        optimizer="adamw",
    ).profile


def train(plan: Plan, arguments: argparse.Namespace) -> float:
    """Median seconds of an iteration; the first two are not counted."""
    model: torch.nn.Module = build_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    booster = Booster(plugin=HeteroHybridParallelPlugin(plan=plan, precision="fp32"))
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = make_batch(arguments.micro_batch * arguments.micro_batches)
    seconds = []
    for _ in range(2 + arguments.rounds):
        dist.barrier()
        start = time.perf_counter()
        booster.execute_pipeline(iter([batch]), model, loss, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        # An iteration ends when all ranks have finished it.
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def run_rank(replicas: int, arguments: argparse.Namespace) -> dict[str, Outcome]:
    """All placements, predicted and trained on this rank."""
    profile = measured_profile(arguments)
    topology = as_profiled(machines(replicas, arguments.megabits), profile)
    outcomes = {}
    for placement in PLACEMENTS:
        plan = price_ranks(
            topology,
            profile,
            ranks_of(placement, replicas),
            micro_batch=arguments.micro_batch,
            global_batch=arguments.micro_batch * arguments.micro_batches * replicas,
        )
        blocking, overlapped = (
            simulate_plan(plan, transfers=transfers).seconds for transfers in ("blocking", "overlapped")
        )
        outcomes[placement] = Outcome(plan.iteration_seconds, blocking, overlapped, train(plan, arguments))
    return outcomes


def measure(replicas: int, arguments: argparse.Namespace) -> dict[str, Outcome]:
    """What rank 0 reports."""
    with nodes([2], 10_000, arguments.megabits, BURST) as found:
        places = [node for node in found for _ in range(replicas)]
        return run_in_namespaces(places, run_rank, replicas, arguments)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="2,4", help="numbers of pipelines (default: %(default)s)")
    parser.add_argument("--megabits", type=float, default=10, help="Mbit/s of each card (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the ViT (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=192, help="hidden size of the ViT (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=8, help="images per micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches per replica (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed iterations (default: %(default)s)")
    arguments = parser.parse_args()
    reason = missing()
    if reason:
        sys.exit(f"cannot measure: {reason}")
    rows = []
    for replicas in map(int, arguments.replicas.split(",")):
        for placement, outcome in measure(replicas, arguments).items():
            predicted = (outcome.closed_form, outcome.blocking, outcome.overlapped)
            cells = [f"{seconds:.3f} ({seconds / outcome.measured - 1:+.1%})" for seconds in predicted]
            rows.append([replicas, placement, f"{outcome.measured:.3f}", *cells])
    message = arguments.micro_batch * (IMAGE // PATCH) ** 2 * arguments.hidden * 4 / 1e6
    print_table(
        f"{message:.2f} MB per message, {arguments.micro_batches} micro-batches, cards of {arguments.megabits:g} Mb/s",
        ["replicas", "placement", "measured [s]", "formula [s]", "simulated, blocking [s]", "overlapped [s]"],
        rows,
    )


if __name__ == "__main__":
    main()
