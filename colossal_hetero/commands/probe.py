"""``colossal-hetero probe``: write the cluster file of the machines that this runs on."""

from __future__ import annotations

from pathlib import Path

import click

from .common import check_outputs, errors_on_one_line, make_console

__all__ = ["probe"]


def _pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [value.partition("=") for value in values]
    for value, (host, _, name) in zip(values, pairs, strict=True):
        if not host or not name:
            raise click.BadParameter(f"{value!r} is not HOST=CLUSTER", context, parameter)
    return [(host, name) for host, _, name in pairs]


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("cluster.toml"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Start that many ranks on this machine; default: one per GPU, or one on the CPU.",
)
@click.option(
    "--cluster-of",
    multiple=True,
    metavar="HOST=CLUSTER",
    callback=_pairs,
    help="Put machines whose host name fits the pattern in that cluster; default: by their fastest kind of NIC.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=600,
    show_default=True,
    help="Seconds after which to give up.",
)
def probe(out: Path, nproc: int | None, cluster_of: list[tuple[str, str]], timeout: float) -> None:
    """Write the cluster file of the machines that this runs on: devices, memory, speed, and how they reach each other.

    Alone it measures this machine. For several, run it on each of them under a launcher:

    torchrun --nnodes ... --nproc-per-node ... -m colossal_hetero.cli probe --out cluster.toml
    """
    from ..probe.probe_command import probe_as_rank
    from ..processes.launch import is_rank, local_devices, start_ranks

    with errors_on_one_line():
        check_outputs(out)
        if is_rank():
            if nproc is not None:
                raise ValueError("--nproc starts ranks, but a launcher has started them already; leave it out")
            probe_as_rank(out, cluster_of, timeout, make_console())
        else:
            arguments = ["--out", str(out), "--timeout", str(timeout)]
            for host, name in cluster_of:
                arguments += ["--cluster-of", f"{host}={name}"]
            start_ranks(nproc or local_devices(), "colossal_hetero.commands.probe", arguments)


if __name__ == "__main__":  # a rank
    probe()
