"""``colossal-hetero replay``: what a job achieves while devices come and go as a trace says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from ..common import Finite, Numbers, check_outputs, errors_on_one_line, make_console, status_line

__all__ = ["replay"]


def _seconds(name: str, default: float, text: str) -> Any:
    """An option for a time in seconds."""
    return click.option(name, type=Finite(min=0), metavar="S", default=default, show_default=True, help=text)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--cluster", type=click.Path(path_type=Path), required=True, help="TOML file with all machines.")
@click.option("--profile", type=click.Path(path_type=Path), required=True, help="JSON file with the model's layers.")
@click.option("--global-batch", type=click.IntRange(min=1), required=True, help="Samples per optimizer step.")
@click.option("--micro-batch", type=Numbers(), help="Sizes of micro-batches to try; default: all in the profile.")
@click.option("--tp", type=Numbers(), help="Tensor-parallel degrees to try; default: all in the profile.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice of devices that leave or come.")
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Iterations from one checkpoint to the next.",
)
@click.option(
    "--folder-bandwidth",
    type=Finite(min=0, min_open=True),
    metavar="GB/S",
    default=1.2,
    show_default=True,
    help="Bandwidth of the shared folder with the checkpoints, in 10⁹ bytes per second for all devices together.",
)
@click.option(
    "--bandwidth",
    type=Finite(min=0, min_open=True),
    metavar="GB/S",
    help="Bandwidth at which a node gets what its devices lack, in 10⁹ bytes per second; default: the slowest channel "
    "between two nodes of the cluster.",
)
@_seconds("--dead-wait", 2.0, "Recovery: until a device that is gone is taken for dead.")
@_seconds("--last-call", 1.0, "Recovery and join: how long a meeting waits for more participants.")
@_seconds("--resume", 1.5, "Recovery and join: planning, new groups and a new start, without moving.")
@_seconds("--process-start", 20.0, "Restart: until processes have ended, started and met.")
@_seconds("--imports", 18.0, "Restart: until new processes have imported torch and Colossal-AI.")
@click.option(
    "--restart-on",
    type=click.Choice(["change", "need"]),
    default="change",
    show_default=True,
    help="When the way `restart` ends its processes: at each change, as torchrun does, or only if a device in use is "
    "gone or the plan with new devices is faster.",
)
@click.option(
    "--wait-for",
    type=click.IntRange(min=1),
    help="Number of devices that the way `waiting` needs; default: as many as there are at the start.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the time lines to this JSON file.")
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw devices and rates: .png, .pdf or .svg."
)
def replay(
    trace: Path,
    cluster: Path,
    profile: Path,
    global_batch: int,
    micro_batch: tuple[int, ...] | None,
    tp: tuple[int, ...] | None,
    seed: int,
    save_every: int,
    folder_bandwidth: float,
    bandwidth: float | None,
    dead_wait: float,
    last_call: float,
    resume: float,
    process_start: float,
    imports: float,
    restart_on: str,
    wait_for: int | None,
    out: Path | None,
    plot: Path | None,
) -> None:
    """Simulate a job while devices come and go as TRACE says, a CSV file with the columns seconds and gpus, and
    optionally devices.

    Prints the goodput, which is samples that count per second, of three ways: this package, which goes on with the
    devices that are left; restarts of all processes from checkpoints in a shared folder; and waiting until a fixed
    number of devices is there. All ways train with the best plan for their devices.
    """
    from ...elastic.replay.assumptions import Assumptions
    from ...elastic.replay.availability_trace import load_availability
    from ...elastic.replay.available_devices import available_devices
    from ...elastic.replay.fitted_plans import FittedPlans, slowest_channel, state_bytes_by_block
    from ...elastic.replay.replay import replay_trace
    from ...elastic.replay.replay_table import render_replay, replay_content
    from ...io.json_files import write_json
    from ...planner.cluster.cluster_file import load_cluster
    from ...planner.cluster.topology import Channel
    from ...planner.profile.layer_profile import load_model_profile

    with errors_on_one_line():
        check_outputs(out, picture=plot)
        rows, topology, model = load_availability(trace), load_cluster(cluster), load_model_profile(profile)
        changes, seconds = available_devices(rows, topology, seed=seed)
        if wait_for is not None and wait_for > len(topology.devices):
            raise ValueError(f"--wait-for {wait_for}: the cluster has {len(topology.devices)} devices; wait for fewer")
        folder_seconds = sum(state_bytes_by_block(model)) / (folder_bandwidth * 1e9)
        assumptions = Assumptions(
            dead_wait_seconds=dead_wait,
            last_call_seconds=last_call,
            resume_seconds=resume,
            process_seconds=process_start,
            import_seconds=imports,
            load_seconds=folder_seconds,
            save_seconds=folder_seconds,
            save_every=save_every,
        )
        with status_line(f"planning for {len({change.devices for change in changes}):,} sets of devices"):
            plans = FittedPlans(
                topology,
                model,
                global_batch=global_batch,
                link=slowest_channel(topology) if bandwidth is None else Channel("given", bandwidth * 1e9),
                micro_batches=micro_batch,
                tensor_parallel=tp,
            )
            result = replay_trace(
                changes,
                seconds,
                plans,
                assumptions,
                global_batch=global_batch,
                cluster=frozenset(range(len(topology.devices))),
                restart_on=cast(Any, restart_on),
                wait_for=wait_for,
            )
        if out is not None:
            names = {"trace": trace.name, "cluster": cluster.name, "profile": profile.name}
            content = replay_content(result, assumptions, **names, seed=seed, restart_on=restart_on)
            write_json(content, out, fill=True)
        if plot is not None:
            from ...elastic.replay.replay_picture import plot_replay

            plot_replay(result, plot)
    console = make_console()
    console.print(render_replay(result))
    console.print(f"plans for {plans.planned} different sets of devices", markup=False)
