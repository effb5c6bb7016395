"""What all command lines share: errors in one line, flags that several examples have, and their checks. No torch."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from colossal_hetero.common.text import check_matplotlib, check_name, parse_rank_factors

DEFAULT_RANKS = 2

IMAGE_SIZE = 32
"""Height and width in pixels of every image that a model sees."""


class UsageError(Exception):
    """Something that the user asked for cannot be done; the message is one line that says what can."""


class Options(argparse.Namespace):
    """The command line, one attribute per flag. A subclass per example adds what follows from the flags."""

    def as_json(self) -> dict[str, Any]:
        """The values by name, as JSON can hold them."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, raised as ``UsageError``, instead of a page of usage."""

    def __init__(self, description: str, epilog: str) -> None:
        super().__init__(prog="train.py", description=description, epilog=epilog, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def add_ranks_flag(parser: argparse.ArgumentParser, what: str = "") -> argparse._ArgumentGroup:
    """``--nproc``; returns its group."""
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--nproc", type=int, metavar="N", help=f"ranks to start{what} (default {DEFAULT_RANKS})")
    return ranks


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """``--data`` and ``--data-dir``."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data",
        choices=("digits", "cifar10", "folder"),
        default="digits",
        help="default digits, which needs no download",
    )
    data.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder: holds train/CLASS/* and test/CLASS/*; cifar10: its download",
    )


def add_training_flags(
    parser: argparse.ArgumentParser,
    *,
    epochs: int,
    what: str = "epochs",
    precisions: Sequence[str] = ("fp32", "bf16", "fp16"),
) -> argparse._ArgumentGroup:
    """``--epochs``, ``--lr``, ``--precision`` and ``--seed``; returns their group."""
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, metavar="N", default=epochs, help=f"{what} (default {epochs})")
    training.add_argument("--lr", type=float, metavar="RATE", default=1e-3, help="peak learning rate (default 1e-3)")
    training.add_argument("--precision", choices=precisions, default="fp32", help="default fp32")
    training.add_argument("--seed", type=int, metavar="N", default=0, help="default 0")
    return training


def check_training(options: Options) -> None:
    """Raise ``UsageError`` if ``--lr`` or ``--seed`` has a value that cannot be used."""
    if not (0.0 < options.lr < math.inf):
        raise UsageError(f"--lr {options.lr} must be a positive number, for example 1e-3")
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"--seed {options.seed} must be between 0 and {2**32 - 1}")


def check_at_least_one(options: Options, *names: str) -> None:
    """Raise ``UsageError`` if one of these options is given and below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{flag(name)} {value} must be at least 1")


def flag(name: str) -> str:
    """The flag of an option: ``--data-dir`` of ``data_dir``."""
    return "--" + name.replace("_", "-")


def attempt(what: str, action: Callable[[], object]) -> None:
    """Call ``action`` before training, so that a failure is not found at the end.

    Raises:
        UsageError: the system refuses; the message begins with ``what``.
    """
    try:
        action()
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror or error}; choose a place that can be written to") from None


def check_file(name: str, path: Path) -> None:
    """Raise ``UsageError`` if the file that the option ``name`` asks for cannot be written."""
    if path.is_dir():
        raise UsageError(f"{flag(name)} {path} is a directory; give the path of a file")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{flag(name)} {path} cannot be written: there is no directory {folder}; create it first")
    attempt(f"{flag(name)} {path} cannot be written", lambda: tempfile.TemporaryFile(dir=folder).close())


def check_plot(path: Path) -> None:
    """Raise ``UsageError`` if no picture can be drawn into this file."""
    try:
        check_name(path)
        check_matplotlib()
    except (ValueError, ImportError) as error:
        raise UsageError(f"--plot {path}: {error}") from None


# Sizes of a vision transformer ---------------------------------------------------------------------------------------


class VitSizeOptions(Options):
    """A command line with these flags."""

    @property
    def vit_sizes(self) -> dict[str, int]:
        """All sizes by name."""
        return {name: getattr(self, name) for name in ("hidden", "depth", "heads", "patch")}


def add_vit_size_flags(parser: argparse.ArgumentParser, *, hidden: int, depth: int, heads: int, patch: int) -> None:
    """Add the flags, with these defaults."""
    model = parser.add_argument_group("model", "a vision transformer")
    for name, default, what in (
        ("hidden", hidden, "embedding width"),
        ("depth", depth, "blocks"),
        ("heads", heads, "attention heads"),
        ("patch", patch, f"patch size in pixels; images are {IMAGE_SIZE} × {IMAGE_SIZE}"),
    ):
        model.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default {default})")


def check_vit_sizes(options: VitSizeOptions) -> None:
    """Raise ``UsageError`` if there is no model of these sizes."""
    check_at_least_one(options, "hidden", "depth", "heads", "patch")
    check_patch(options.patch)
    if options.hidden % options.heads:
        raise UsageError(f"--heads {options.heads} does not divide --hidden {options.hidden}; use a divisor of it")


def check_patch(patch: int) -> None:
    """Raise ``UsageError`` if images cannot be cut into patches of ``patch`` × ``patch`` pixels."""
    if IMAGE_SIZE % patch:
        valid = ", ".join(str(size) for size in range(1, IMAGE_SIZE + 1) if IMAGE_SIZE % size == 0)
        raise UsageError(
            f"--patch {patch} does not divide the image size {IMAGE_SIZE} × {IMAGE_SIZE}; valid are {valid}"
        )


# Slow ranks of the ZeRO and the pipeline example ---------------------------------------------------------------------


MEANS = ("auto", "quota", "repeat")
DEFAULT = "1:4"


def add_straggler_flags(group: argparse._ArgumentGroup) -> None:
    """Add the two flags."""
    group.add_argument(
        "--straggler",
        metavar="RANK:FACTOR[,…]|none",
        help=f"make ranks slower by a whole number of times (default {DEFAULT}; none: no rank)",
    )
    group.add_argument(
        "--straggler-means",
        choices=MEANS,
        default="auto",
        help="quota: the kernel holds the rank to 1 / FACTOR of a core (Linux, root); repeat: the rank does every pass "
        "FACTOR times; auto: quota where that is possible, else repeat (default auto)",
    )


def slowdowns(straggler: str | None, world_size: int) -> dict[int, int]:
    """How many times as long each slow rank's work takes, by rank.

    Args:
        straggler: as on the command line; None means the default if there is more than one rank, else no slow rank.
        world_size: number of ranks.
    """
    text = straggler if straggler is not None else (DEFAULT if world_size > 1 else "none")
    factors = {} if text == "none" else parse_rank_factors(text)
    return {rank: int(factor) for rank, factor in factors.items() if factor != 1}


def check_stragglers(straggler: str | None, world_size: int) -> None:
    """Raise ``UsageError`` if ``--straggler`` names a rank that does not exist, or a factor that is not possible."""
    if straggler in (None, "none"):
        return
    shown = f"--straggler {straggler}"
    try:
        factors = parse_rank_factors(straggler)
    except ValueError as error:
        raise UsageError(f"{shown}: {error}") from None
    for rank, factor in factors.items():
        if not 0 <= rank < world_size:
            raise UsageError(f"{shown}: there is no rank {rank}; there are {world_size} ranks, 0 to {world_size - 1}")
        if not (math.isfinite(factor) and factor >= 1 and factor == int(factor)):
            raise UsageError(f"{shown}: rank {rank} can be slowed a whole number of times, 1 or more, not {factor:g}")


# Training in two ways ------------------------------------------------------------------------------------------------


Profile = TypeVar("Profile")


class ComparisonOptions(VitSizeOptions):
    """The command line. ``straggler`` is None for the default, and "none" for no slow rank."""


def add_global_batch_flag(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--global-batch", type=int, metavar="N", default=64, help="images per step (default 64)")


def add_profile_flag(group: argparse._ArgumentGroup, what: str) -> None:
    """``--profile``, a file with ``what`` was measured."""
    group.add_argument(
        "--profile", type=Path, metavar="FILE.json", help=f"{what}: read if the file exists, else measured and written"
    )


def check_comparison(options: ComparisonOptions, world_size: int) -> None:
    """Raise ``UsageError`` if a flag that both examples have cannot work with ``world_size`` ranks."""
    check_at_least_one(options, "nproc", "global_batch", "epochs")
    check_training(options)
    check_vit_sizes(options)
    check_stragglers(options.straggler, world_size)


def existing_profile(options: ComparisonOptions, load: Callable[[Path], Profile]) -> Profile | None:
    """What the file of ``--profile`` holds; None if there is no such file yet.

    Raises:
        UsageError: the file is not a profile that ``load`` can read.
    """
    if options.profile is None or not options.profile.is_file():
        return None
    try:
        return load(options.profile)
    except ValueError as error:
        raise UsageError(f"--profile {options.profile}: {' '.join(str(error).split())}") from None


def check_outputs(options: ComparisonOptions, *names: str) -> None:
    """Raise ``UsageError`` if a file that one of these options asks for cannot be written."""
    for name in names:
        path = getattr(options, name)
        if path is not None and not (name == "profile" and path.is_file()):
            check_file(name, path)
