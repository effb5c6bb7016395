"""What all command lines share: errors in one line, flags that every example has, and their checks."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    *("DEFAULT_RANKS", "IMAGE_SIZE", "OneLineParser", "Options", "UsageError"),
    *("add_data_flags", "add_ranks_flag", "add_training_flags", "attempt", "check_at_least_one"),
    *("check_file", "check_training", "flag"),
]

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
