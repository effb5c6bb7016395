"""AutoHet's three scenarios of recovery: layer by layer from the nearest place, or all from the shared folder.

    python -m benchmarks.checkpoint.recovery [--cloud MB/s] [--width N] [--rounds N]

GPT-2 with four blocks is saved by two replicas of two stages. The first stages are in node 0, the second ones in
node 1. Then, in AutoHet's Figure 10:

- A: one replica is lost; both nodes are still there, so that everything is on their disks.
- B: node 0 is lost. Two replicas without a pipeline go on in node 1, which has the second half of the layers.
- C: nodes 2 and 3 join as a third replica; what they need is on the disks of nodes 0 and 1.

Nodes are ranks on this machine with folders of their own. All reads of the shared folder together get ``--cloud`` MB/s,
those of each node's folder 3500 / 1200 times as much, as in the paper; between nodes, messages go over Gloo without a
limit. Times are those of ``plugin.resume`` on the slowest rank, the median of several runs in new processes. The bound
is the time in which the bytes that were read can pass the busiest disk or the shared folder. Every tensor is compared
with those that were saved.

The control has no local folders, and each rank reads all that it needs from the shared folder. Without local folders,
``resume`` reads everything once and sends it to the other replicas; that is measured as well.

Source: AutoHet (Wang et al. 2025), section V, Figure 10: 4.38, 1.49 and 3.59 times as fast as Varuna.
"""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

import tests.support.checkpoint_runs as runs
from benchmarks.common import print_table, read_options
from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint import exchange
from colossal_hetero.checkpoint.places import Place
from colossal_hetero.checkpoint.transfers import Read
from colossal_hetero.common.files import write_json
from tests.support.harness import run_ranks

DISK_BY_CLOUD = 3500 / 1200
"""MB/s of a node's disk by those of the cloud storage in the paper."""


class Way(Enum):
    """Where the ranks read."""

    ALONE = "each from shared"
    ONCE = "once from shared"
    NEAREST = "nearest place"


class Scenario(NamedTuple):
    """A plan after a change of devices."""

    options: dict[str, int]
    nodes: tuple[int, ...]
    """Node of each rank."""
    paper: float
    """How much faster AutoHet was than loading everything from the cloud."""


SAVED = Scenario(dict(pp_size=2), (0, 1, 0, 1), 1.0)
SCENARIOS = {
    "A: a replica is lost": Scenario(dict(pp_size=2), (0, 1), 4.38),
    "B: node 0 is lost": Scenario(dict(pp_size=1), (1, 1), 1.49),
    "C: two nodes join": Scenario(dict(pp_size=2), (0, 1, 0, 1, 2, 3), 3.59),
}


def take_turn(clock: Path, length: int, bytes_per_second: float) -> None:
    """Wait until so many bytes have passed what all processes with the same ``clock`` share."""
    with clock.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        free, total = map(float, (file.read() or "0 0").split())
        until = max(time.time(), free) + length / bytes_per_second
        file.truncate(0)
        file.write(f"{until!r} {total + length}")
    time.sleep(max(until - time.time(), 0.0))


def bytes_of(clock: Path) -> float:
    return float(clock.read_text().split()[1]) if clock.exists() else 0.0


@contextmanager
def throttled(root: Path, cloud_bytes_per_second: float) -> Iterator[None]:
    """In the block, reading from the folders in ``root`` takes as long as with these bandwidths."""
    read = Place.read

    @wraps(read)
    def slow(place: Place, file: str, start: int, length: int) -> bytearray:
        folder = Path(place.name).relative_to(root).parts[0]
        speed = cloud_bytes_per_second * (1.0 if folder == "shared" else DISK_BY_CLOUD)
        content = read(place, file, start, length)
        take_turn(root / f"{folder}.clock", len(content), speed)
        return content

    Place.read = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        Place.read = read  # type: ignore[method-assign]


@contextmanager
def reading_alone() -> Iterator[None]:
    """In the block, each rank reads all that it needs itself."""

    def alone(fetches: Any, node_of: Any) -> tuple[dict[int, list[Read]], list[Any]]:
        return {rank: list(dict.fromkeys(fetch.read for fetch in found)) for rank, found in fetches.items()}, []

    sharing = exchange.reads_and_transfers
    exchange.reads_and_transfers = alone
    try:
        yield
    finally:
        exchange.reads_and_transfers = sharing


def boosted(scenario: Scenario, root: Path, width: int, local: bool) -> runs.Run:
    node = f"node{scenario.nodes[dist.get_rank()]}"
    checkpoints = CheckpointConfig(local=root / node if local else None, shared=root / "shared", node=node)
    return runs.boosted("gpt2", runs.hybrid(**scenario.options, checkpoints=checkpoints), n_embd=width)


def save(root: Path, width: int) -> runs.InMemory:
    run = boosted(SAVED, root, width, local=True)
    runs.train(run, [0])
    assert run.plugin.save(run.model, run.optimizer, step=1)
    run.plugin.wait_for_saves()
    return runs.gathered(run, everywhere=False)


def recover(scenario: Scenario, root: Path, width: int, way: Way, cloud: float) -> tuple[float, runs.InMemory]:
    """Seconds of this rank, and what all ranks hold afterwards, on rank 0."""
    run = boosted(scenario, root, width, way is Way.NEAREST)
    dist.barrier()
    with throttled(root, cloud), reading_alone() if way is Way.ALONE else nullcontext():
        begin = time.perf_counter()
        run.plugin.resume(run.model, run.optimizer)
        seconds = time.perf_counter() - begin
    return seconds, runs.gathered(run, everywhere=False)


def measure(
    scenario: Scenario, root: Path, width: int, way: Way, cloud: float, expected: runs.InMemory
) -> tuple[float, float]:
    """Seconds of the slowest rank, and of the bound."""
    for clock in root.glob("*.clock"):
        clock.unlink()
    results = run_ranks(len(scenario.nodes), recover, scenario, root, width, way, cloud)
    assert runs.different_tensors(results[0][1], expected) == []
    disks = [bytes_of(clock) / DISK_BY_CLOUD for clock in root.glob("node*.clock")]
    bound = max([bytes_of(root / "shared.clock"), *disks]) / cloud
    return max(seconds for seconds, _ in results), bound


def main() -> None:
    arguments = read_options(__doc__, cloud=40.0, width=480, rounds=3, out=Path)
    width, cloud = arguments.width, arguments.cloud * 1e6
    rows, seconds = [], {}
    with tempfile.TemporaryDirectory(prefix="recovery") as folder:
        root = Path(folder)
        expected = run_ranks(len(SAVED.nodes), save, root, width)[0]
        for name, scenario in SCENARIOS.items():
            found: dict[Way, list[tuple[float, float]]] = {way: [] for way in Way}
            for _ in range(arguments.rounds):
                for way, measured in found.items():
                    measured.append(measure(scenario, root, width, way, cloud, expected))
            alone, once, nearest = (median(each for each, _ in found[way]) for way in Way)
            bound = median(each for _, each in found[Way.NEAREST])
            figures = (alone, once, nearest, alone / nearest, scenario.paper, bound, nearest / bound)
            rows.append((name, *(f"{figure:.2f}" for figure in figures)))
            seconds[name] = {"alone": alone, "once": once, "nearest": nearest, "paper": scenario.paper}
        total = sum(tensor.numel() * tensor.element_size() for tensor in expected.tensors.values())
    if arguments.out is not None:
        write_json(seconds, arguments.out)
    print_table(
        f"{total / 1e6:.0f} MB, shared folder {arguments.cloud:g} MB/s; aims: at least AutoHet's factor, ≤ 1.1 × bound",
        ["scenario", *(f"{way.value} [s]" for way in Way), "× as fast", "AutoHet", "bound [s]", "× bound"],
        rows,
    )


if __name__ == "__main__":
    main()
