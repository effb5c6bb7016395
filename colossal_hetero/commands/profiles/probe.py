"""``colossal-hetero probe``: measure machines and write their cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from ..common import Finite, check_outputs, errors_on_one_line, make_console

__all__ = ["probe"]


def _pairs(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str]]:
    pairs = [value.partition("=") for value in values]
    for value, (host, _, name) in zip(values, pairs, strict=True):
        if not host or not name:
            raise click.BadParameter(f"{value!r} does not have the form HOST=CLUSTER", context, parameter)
    return [(host, name) for host, _, name in pairs]


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("cluster.toml"),
    show_default=True,
    help="Cluster file to write.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Number of ranks to start on this machine; default: one per GPU, or one if there is no GPU.",
)
@click.option(
    "--cluster-of",
    multiple=True,
    metavar="HOST=CLUSTER",
    callback=_pairs,
    help="Put machines whose host name matches the pattern HOST into CLUSTER; default: by their fastest kind of NIC.",
)
@click.option(
    "--timeout",
    type=Finite(min=1),
    default=600,
    show_default=True,
    help="Give up after this number of seconds.",
)
def probe(out: Path, nproc: int | None, cluster_of: list[tuple[str, str]], timeout: float) -> None:
    """Measure machines and write their cluster file: devices, memory, speed, latency and bandwidth between devices.

    Without a launcher it measures this machine. To measure several machines, start it on each with a launcher:

    torchrun --nnodes ... --nproc-per-node ... -m colossal_hetero.cli probe --out cluster.toml
    """
    from ...probe.probe_command import probe_as_rank
    from ...processes.launch import is_rank, local_devices, start_ranks

    with errors_on_one_line():
        check_outputs(out)
        if is_rank():
            if nproc is not None:
                raise ValueError("a launcher has already started the ranks; leave out --nproc, which starts ranks too")
            probe_as_rank(out, cluster_of, timeout, make_console())
        else:
            arguments = ["--out", str(out), "--timeout", str(timeout)]
            for host, name in cluster_of:
                arguments += ["--cluster-of", f"{host}={name}"]
            start_ranks(nproc or local_devices(), "colossal_hetero.commands.profiles.probe", arguments)


if __name__ == "__main__":  # a rank
    probe()
