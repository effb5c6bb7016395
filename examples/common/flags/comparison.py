"""What the command lines of the ZeRO and the pipeline example share: both train in two ways and compare these."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .parser import UsageError, check_at_least_one, check_file, check_training
from .slow_processes import check_stragglers
from .vit_sizes import VitSizeOptions, check_vit_sizes

__all__ = [
    *("ComparisonOptions", "add_global_batch_flag", "add_profile_flag", "check_comparison", "check_outputs"),
    *("existing_profile",),
]

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
