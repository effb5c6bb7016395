"""The command line of the ZeRO example, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colossal_hetero.planner.batches.batch_profile import load_profile

from . import slow_processes
from .parser import (
    OneLineParser,
    UsageError,
    add_data_flags,
    add_ranks_flag,
    add_training_flags,
    check_at_least_one,
    check_file,
    check_training,
)
from .vit_sizes import VitSizeOptions, add_vit_size_flags, check_vit_sizes

__all__ = ["ZeroOptions", "check_options", "parse_options"]


class ZeroOptions(VitSizeOptions):
    """The command line. ``straggler`` is None for the default, and "none" for no slow rank."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways to divide batches that are trained with, in their order."""
        return ("uniform", "exact") if self.method == "both" else (self.method,)

    def as_json(self) -> dict[str, Any]:
        """The values by name, as summary files hold them."""
        return slow_processes.summary_names(super().as_json())


def _make_parser() -> OneLineParser:
    parser = OneLineParser(
        "Train with ZeRO on devices that are not equally fast, with equal batches and with fitted ones.",
        "It starts its own ranks; under torchrun or colossalai run it joins those.",
    )
    slow_processes.add_straggler_flags(add_ranks_flag(parser))
    batches = parser.add_argument_group("batches")
    batches.add_argument(
        "--stage",
        choices=("0", "1", "2", "3", "auto"),
        default="1",
        help="ZeRO stage; auto: the lowest at which a sample fits (default 1)",
    )
    batches.add_argument("--global-batch", type=int, metavar="N", default=64, help="images per step (default 64)")
    batches.add_argument(
        "--method",
        choices=("uniform", "exact", "both"),
        default="both",
        help="uniform: the same for every rank, as Colossal-AI divides; exact: the division that takes the least time; "
        "both: one after the other (default both)",
    )
    batches.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="memory and speed of each device: read if the file exists, else measured and written",
    )
    add_data_flags(parser)
    add_training_flags(parser, epochs=8, what="epochs of each way")
    add_vit_size_flags(parser, hidden=256, depth=4, heads=4, patch=8)
    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what was measured, at the end")
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> ZeroOptions:
    """The options in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return _make_parser().parse_args(arguments, namespace=ZeroOptions())


def check_options(options: ZeroOptions, world_size: int) -> None:
    """Find what cannot work with ``world_size`` ranks, without torch.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    check_at_least_one(options, "nproc", "global_batch", "epochs")
    check_training(options)
    check_vit_sizes(options)
    if options.precision == "fp16" and options.stage == "3":
        raise UsageError("--precision fp16 is not available with --stage 3; use bf16 or fp32")
    if options.method == "both" and options.stage == "auto" and options.profile is not None:
        # The second method could use what the first has measured at another stage.
        raise UsageError("--profile holds for one stage; give it with --stage 0, 1, 2 or 3 rather than auto")
    slow_processes.check_stragglers(options.straggler, world_size)
    if options.profile is not None and options.profile.is_file():
        _check_profile(options, options.profile, world_size)
    for name in ("summary", "profile"):
        path = getattr(options, name)
        if path is not None and not (name == "profile" and path.is_file()):
            check_file(name, path)


def _check_profile(options: ZeroOptions, path: Path, world_size: int) -> None:
    try:
        profile = load_profile(path)
    except ValueError as error:
        raise UsageError(f"--profile {path}: {' '.join(str(error).split())}") from None
    remedy = "delete the file, or name another one, to measure again"
    if len(profile.ranks) != world_size:
        raise UsageError(f"--profile {path} is of {len(profile.ranks)} ranks, not {world_size}; {remedy}")
    for name, wanted, found in (
        ("stage", options.stage, str(profile.stage)),
        ("precision", options.precision, profile.precision),
    ):
        if wanted not in (found, "auto"):
            raise UsageError(f"--profile {path} was made with --{name} {found}, not {wanted}; {remedy}")
