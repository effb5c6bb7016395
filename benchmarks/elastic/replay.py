"""Replay a trace of spot GPUs on a cluster of 16 devices of two kinds, under several assumptions.

The cluster has two nodes of four A100 and two of four V100; the model is OPT-350 with the profile in `examples/plans`.
The trace says how many devices are there; which ones, is chosen at random. "Goodput" is samples that count, per second.
The first table is that of `colossal-hetero replay`. The second one changes one assumption at a time, and shows the
goodput of this package relative to a restart from a shared folder: of one that happens at each change, as torchrun
restarts, and of one that happens only if a device in use is gone or the plan with new devices is faster. The third one
is about the number of devices that "waiting" needs.

Sailor's repository (github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich) has such a trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from statistics import mean

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from colossal_hetero.elastic.replay.assumptions import Assumptions
from colossal_hetero.elastic.replay.availability_trace import AvailabilityRow, load_availability
from colossal_hetero.elastic.replay.available_devices import available_devices
from colossal_hetero.elastic.replay.fitted_plans import FittedPlans, slowest_channel, state_bytes_by_block
from colossal_hetero.elastic.replay.replay import Replay, replay_trace
from colossal_hetero.elastic.replay.replay_table import render_replay
from colossal_hetero.elastic.replay.restarted_job import RestartOn
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.profile.layer_profile import load_model_profile

HERE = Path(__file__).resolve().parent
CLUSTER, PROFILE = HERE / "a100-v100.toml", HERE.parents[1] / "examples/plans/opt-350-a100-v100.json"
GLOBAL_BATCH = 256
FOLDER_BYTES_PER_SECOND = 1.2e9
"""AutoHet, section V: cloud storage of 1,200 MB/s."""
SEEDS = range(3)
"""Of the random choice of devices. Other global batches, which need plans of their own, have only the first one."""
AIM = 1.3


class Benchmark:
    """Replays of one trace; plans are kept from one replay to the next."""

    def __init__(self, rows: tuple[AvailabilityRow, ...]) -> None:
        self._rows, self._cluster, self._profile = rows, load_cluster(CLUSTER), load_model_profile(PROFILE)
        self.state_bytes = sum(state_bytes_by_block(self._profile))
        self._plans: dict[int, FittedPlans] = {}

    def assumptions(self, folder_bytes_per_second: float = FOLDER_BYTES_PER_SECOND) -> Assumptions:
        """The usual assumptions, with another bandwidth of the folder."""
        seconds = self.state_bytes / folder_bytes_per_second
        return Assumptions(load_seconds=seconds, save_seconds=seconds)

    def replay(
        self,
        assumptions: Assumptions,
        *,
        seed: int = 0,
        global_batch: int = GLOBAL_BATCH,
        restart_on: RestartOn = "change",
        wait_for: int | None = None,
    ) -> Replay:
        """One replay."""
        if global_batch not in self._plans:
            self._plans[global_batch] = FittedPlans(
                self._cluster, self._profile, global_batch=global_batch, link=slowest_channel(self._cluster)
            )
        changes, seconds = available_devices(self._rows, self._cluster, seed=seed)
        return replay_trace(
            changes,
            seconds,
            self._plans[global_batch],
            assumptions,
            global_batch=global_batch,
            cluster=frozenset(range(len(self._cluster.devices))),
            restart_on=restart_on,
            wait_for=wait_for,
        )

    @property
    def planned(self) -> int:
        """For how many sets of devices a plan was looked for."""
        return sum(plans.planned for plans in self._plans.values())


def table_of(*columns: str) -> Table:
    table = Table(box=MARKDOWN)
    for column in columns:
        # In a plain string rich would read the brackets as markup.
        table.add_column(Text(column))
    return table


def ratios(found: list[Replay]) -> str:
    """Goodput of this package relative to the restart: mean, smallest and largest over the seeds."""
    values = [replay.ratio("elastic", "restart") for replay in found]
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return f"{known[0]:.2f}" if known else "-"
    return f"{mean(known):.2f} ({min(known):.2f} to {max(known):.2f})"


def share(found: list[Replay]) -> str:
    """Goodput of this package relative to the ideal, mean over the seeds."""
    return f"{100 * mean(replay.goodput('elastic') / replay.ideal_goodput for replay in found):.0f}"


def cases(benchmark: Benchmark) -> list[tuple[str, Assumptions, int]]:
    """What is changed, the assumptions, and the global batch."""
    usual = benchmark.assumptions()
    found = [("the usual ones", usual, GLOBAL_BATCH)]
    found += [
        (
            f"a checkpoint every {every} iterations" if every > 1 else "a checkpoint after each iteration",
            dataclasses.replace(usual, save_every=every),
            GLOBAL_BATCH,
        )
        for every in (1, 5, 10, 20, 100)
    ]
    quick = {"process_seconds": 5.0, "import_seconds": 5.0}
    found += [
        ("folder of 0.2 GB/s", benchmark.assumptions(0.2e9), GLOBAL_BATCH),
        ("folder of 10 GB/s", benchmark.assumptions(10e9), GLOBAL_BATCH),
        ("processes start in 10 s instead of 38 s", dataclasses.replace(usual, **quick), GLOBAL_BATCH),  # type: ignore[arg-type]
        (
            "this package starts its processes again too, and keeps states in memory (recovery by restart, for NCCL)",
            dataclasses.replace(usual, resume_seconds=usual.resume_seconds + usual.start_seconds),
            GLOBAL_BATCH,
        ),
        ("dead wait of 15 s instead of 2 s", dataclasses.replace(usual, dead_wait_seconds=15.0), GLOBAL_BATCH),
        ("global batch of 64", usual, 64),
        ("global batch of 1,024", usual, 1024),
        (
            "most favorable to restarts: checkpoint after each iteration, folder of 10 GB/s, start in 10 s",
            dataclasses.replace(benchmark.assumptions(10e9), save_every=1, **quick),  # type: ignore[arg-type]
            GLOBAL_BATCH,
        ),
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="CSV file with the columns seconds and gpus")
    arguments = parser.parse_args()
    started = time.process_time()
    try:
        benchmark = Benchmark(load_availability(arguments.trace))
        usual = benchmark.assumptions()
        shown = benchmark.replay(usual)
    except ValueError as error:
        sys.exit(str(error))
    took = time.process_time() - started
    console = Console(width=160, highlight=False)
    console.print(f"OPT-350, {GLOBAL_BATCH} sequences per iteration, {benchmark.state_bytes / 1e9:.1f} GB of state\n")
    console.print(render_replay(shown))
    console.print(f"{benchmark.planned} sets of devices were planned for; {took:.1f} s of processor time\n")

    table = table_of("assumption", "of ideal [%]", "this package / restart", "/ restart only if needed")
    worst = min(benchmark.replay(usual, seed=seed).ratio("elastic", "restart") or 0.0 for seed in SEEDS)
    for name, assumptions, global_batch in cases(benchmark):
        seeds = SEEDS if global_batch == GLOBAL_BATCH else SEEDS[:1]
        by_rule = {
            rule: [
                benchmark.replay(assumptions, seed=seed, global_batch=global_batch, restart_on=rule) for seed in seeds
            ]
            for rule in ("change", "need")
        }
        table.add_row(name, share(by_rule["change"]), ratios(by_rule["change"]), ratios(by_rule["need"]))
    console.print(table)
    console.print(f"mean of {len(SEEDS)} random choices of devices (smallest to largest)\n")

    table = table_of("waiting for", "of ideal [%]", "waiting [s]", "this package / waiting")
    for wait_for in (14, 13, 12, 11, 10, 9, 8, 7):
        replay = benchmark.replay(usual, wait_for=wait_for)
        ratio = replay.ratio("elastic", "waiting")
        table.add_row(
            f"{wait_for} devices",
            f"{100 * replay.goodput('waiting') / replay.ideal_goodput:.0f}",
            f"{replay.jobs['waiting'].seconds('waiting'):,.0f}",
            f"{ratio:.2f}" if ratio is not None else "-",
        )
    console.print(table)
    reached = "reached" if worst >= AIM else "missed"
    console.print(f"aim: this package / restart at least {AIM} with the usual assumptions; {reached}: {worst:.2f}")
    sys.exit(worst < AIM)


if __name__ == "__main__":
    main()
