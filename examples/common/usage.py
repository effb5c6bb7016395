"""What the examples' command lines share: errors in one line, and files that can be written at the end."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = [
    *("DATA_SETS", "IMAGE_SIZE", "OneLineParser", "UsageError"),
    *("add_data_flags", "attempt", "check_file", "flag", "write_whole"),
]

IMAGE_SIZE = 32
"""Height and width in pixels of every image that a model sees."""

DATA_SETS = ("digits", "cifar10", "folder")


class UsageError(Exception):
    """Something that the user asked for cannot be done; the message is one line that says what can."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line rather than below a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """``--data`` and ``--data-dir``."""
    data = parser.add_argument_group("data")
    data.add_argument("--data", choices=DATA_SETS, default="digits", help="default digits, which needs no download")
    data.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="folder: holds train/CLASS/* and test/CLASS/*; cifar10: its download",
    )


def flag(name: str) -> str:
    """The flag of an option: ``--data-dir`` of ``data_dir``."""
    return "--" + name.replace("_", "-")


def attempt(what: str, action: Callable[[], object]) -> None:
    """Do it now rather than find out at the end of the training.

    Raises ``UsageError`` that begins with ``what`` if the system refuses.
    """
    try:
        action()
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror or error}; choose a place that can be written to") from None


def check_file(name: str, path: Path) -> None:
    """Raises ``UsageError`` if the file that the option ``name`` asks for cannot be written."""
    if path.is_dir():
        raise UsageError(f"{flag(name)} {path} is a directory; give the path of a file")
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"{flag(name)} {path} cannot be written: there is no directory {folder}; create it first")
    attempt(f"{flag(name)} {path} cannot be written", lambda: tempfile.TemporaryFile(dir=folder).close())


def write_whole(path: Path, text: str) -> None:
    """A reader sees the file of an earlier run or this one, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
