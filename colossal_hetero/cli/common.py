"""Parts of all subcommands: errors on one line, a console, types of options, checks of files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checkpoint.config import CheckpointError
from ..common.atomic_files import check_writable
from ..common.text import MarkedError, check_matplotlib, check_name

if TYPE_CHECKING:
    from rich.status import Status

    from ..common.tables import ReportConsole
    from ..planner.cluster.topology import Topology
    from ..planner.profile.layer_profile import ModelProfile


MAX_NUMBER, MAX_LAYERS = 1_000_000_000, 100_000
"""Largest number of samples, micro-batches or sizes of layers, and most layers, that options take."""
MAX_AMOUNT = 10**15  # largest number of samples of a training, of seconds, dollars or gigabytes


class Finite(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number) or number > MAX_AMOUNT:
            self.fail(f"{value} is not a finite number of at most {MAX_AMOUNT:,}", param, ctx)
        return number


class Numbers(click.ParamType):
    name = "n,n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(sorted({int(part) for part in str(value).split(",")}))
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers; write it like 1,2,4", param, ctx)
        if numbers[0] < 1:
            self.fail(f"{value!r}: {numbers[0]} is below 1", param, ctx)
        if numbers[-1] > MAX_NUMBER:
            self.fail(f"{value!r}: {numbers[-1]} is above {MAX_NUMBER:,}", param, ctx)
        return numbers


class Quotas(click.ParamType):
    """Whole numbers of at least 0 by name, separated by commas."""

    name = "name=n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        quotas: dict[str, int] = {}
        for part in str(value).split(","):
            name, _, number = part.rpartition("=")
            if not name or not number.isdecimal():
                self.fail(f"{part!r} is not a name and a whole number; write it like A100-40=16,v100=2", param, ctx)
            if name in quotas:
                self.fail(f"{name} is given twice", param, ctx)
            quotas[name] = int(number)
        return quotas


class Choices(click.ParamType):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.name = f"{'|'.join(self.names)}|all,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        chosen = set(str(value).lower().split(","))  # help shows the names in capital letters
        for name in sorted(chosen - {*self.names, "all"}):
            self.fail(f"{name!r} is not one of {', '.join(self.names)}, all", param, ctx)
        return tuple(name for name in self.names if name in chosen or "all" in chosen)


COUNT = click.IntRange(1, MAX_NUMBER)
FILE = click.Path(path_type=Path)
cluster_argument = click.argument("cluster", type=FILE)
profile_argument = click.argument("profile", type=FILE)


def file_option(name: str, help: str, **options: Any) -> Any:
    """An option with a file to write, or to read."""
    return click.option(name, type=click.Path(path_type=Path, dir_okay=False), help=help, **options)


def choice_option(name: str, *choices: str, help: str, **options: Any) -> Any:
    """An option with one of several words; the first is the default."""
    return click.option(name, type=click.Choice(choices), default=choices[0], show_default=True, help=help, **options)


def amount_option(name: str, metavar: str, help: str, **options: Any) -> Any:
    """An option with an amount of at least 0."""
    return click.option(name, type=Finite(min=0), metavar=metavar, help=help, **options)


global_batch_option = click.option(
    "--global-batch", type=click.IntRange(min=1), required=True, help="Samples per optimizer step, over all devices."
)
sizes_option = click.option(
    "--micro-batch",
    "micro_batches",
    type=Numbers(),
    help="Sizes of micro-batches to try, in samples; default: all in the profile.",
)
degrees_option = click.option(
    "--tp", "tensor_parallel", type=Numbers(), help="Tensor-parallel degrees to try; default: all in the profile."
)
memory_reserve_option = amount_option(
    "--memory-reserve",
    "GB",
    "Memory of each device that is not planned with, in 10⁹ bytes; default: as in the cluster file.",
)

micro_batch_option = click.option(
    "--micro-batch",
    "micro_batches",
    type=Numbers(),
    default="1,2,4,8",
    show_default=True,
    help="Sizes of micro-batches, in samples. Plans may use all sizes from the first to the last.",
)

profile_out_option = file_option("--out", "The file to write.", default=Path("profile.json"), show_default=True)


class CommandError(click.ClickException):
    """An error that the user can correct: one line, no traceback, exit code 2."""

    exit_code = 2


@contextmanager
def errors_on_one_line() -> Iterator[None]:
    """Turn errors that the user can correct into one line; if in a text, with a mark at the place."""
    try:
        yield
    except MarkedError as error:
        raise CommandError(f"{' '.join(str(error).split())}\n{error.pointer}") from None
    except (ValueError, ImportError, OSError, CheckpointError) as error:
        raise CommandError(" ".join(_in_words(error).split())) from None


def _in_words(error: Exception) -> str:
    # Here, so that commands without an error need not import pydantic.
    from pydantic import ValidationError

    from ..common.files import errors_in_words

    return errors_in_words(error, ()) if isinstance(error, ValidationError) else str(error)


def make_console() -> ReportConsole:
    from ..common.tables import ReportConsole

    return ReportConsole()


def load_inputs(cluster: Path, profile: Path, memory_reserve: float | None = None) -> tuple[Topology, ModelProfile]:
    """What the files describe; ``memory_reserve`` is in gigabytes of each device."""
    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.profile.fitted_profiles import on_links
    from ..planner.profile.layer_profile import load_profile

    if cluster.suffix == ".json" and profile.suffix == ".toml":
        raise ValueError(f"the cluster comes first, then the profile: give {profile} before {cluster}")
    topology = load_cluster(cluster)
    model = on_links(load_profile(profile), topology)
    return (topology if memory_reserve is None else topology.with_memory_reserve(round(memory_reserve * 1e9))), model


def status(what: str) -> Status:
    """A context in which a terminal says what is being done."""
    from rich.console import Console

    return Console(stderr=True).status(what)


def check_outputs(*paths: Path | None, picture: Path | None = None) -> None:
    for path in (*paths, picture):
        if path is not None:
            check_writable(path)
    if picture is not None:
        check_name(picture)
        check_matplotlib()
