"""The command line of the ZeRO example, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colossal_hetero.planner.batches.batch_profile import BatchProfile, load_profile
from examples.common.options import (
    ComparisonOptions,
    OneLineParser,
    UsageError,
    add_data_flags,
    add_global_batch_flag,
    add_profile_flag,
    add_ranks_flag,
    add_straggler_flags,
    add_training_flags,
    add_vit_size_flags,
    check_comparison,
    check_outputs,
    existing_profile,
)


class ZeroOptions(ComparisonOptions):
    """See :class:`ComparisonOptions`."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The ways to divide batches that are trained with, in their order."""
        return ("uniform", "exact") if self.method == "both" else (self.method,)


def _make_parser() -> OneLineParser:
    parser = OneLineParser(
        "Train with ZeRO on devices that are not equally fast, with equal batches and with fitted ones.",
        "It starts its own ranks; under torchrun or colossalai run it joins those.",
    )
    add_straggler_flags(add_ranks_flag(parser))
    batches = parser.add_argument_group("batches")
    batches.add_argument(
        "--stage",
        choices=("0", "1", "2", "3", "auto"),
        default="1",
        help="ZeRO stage; auto: the lowest at which a sample fits (default 1)",
    )
    add_global_batch_flag(batches)
    batches.add_argument(
        "--method",
        choices=("uniform", "exact", "both"),
        default="both",
        help="uniform: the same for every rank, as Colossal-AI divides; exact: the division that takes the least time; "
        "both: one after the other (default both)",
    )
    add_profile_flag(batches, "memory and speed of each device")
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
    check_comparison(options, world_size)
    if options.precision == "fp16" and options.stage == "3":
        raise UsageError("--precision fp16 is not available with --stage 3; use bf16 or fp32")
    if options.method == "both" and options.stage == "auto" and options.profile is not None:
        # The second method could use what the first has measured at another stage.
        raise UsageError("--profile holds for one stage; give it with --stage 0, 1, 2 or 3 rather than auto")
    if (profile := existing_profile(options, load_profile)) is not None:
        _check_profile(options, profile, world_size)
    check_outputs(options, "summary", "profile")


def _check_profile(options: ZeroOptions, profile: BatchProfile, world_size: int) -> None:
    made = f"--profile {options.profile}"
    remedy = "delete the file, or name another one, to measure again"
    if len(profile.ranks) != world_size:
        raise UsageError(f"{made} is of {len(profile.ranks)} ranks, not {world_size}; {remedy}")
    for name, wanted, found in (
        ("stage", options.stage, str(profile.stage)),
        ("precision", options.precision, profile.precision),
    ):
        if wanted not in (found, "auto"):
            raise UsageError(f"{made} was made with --{name} {found}, not {wanted}; {remedy}")


def check(options: ZeroOptions, world_size: int) -> None:
    """:func:`check_options`, and whether there is enough data, for which torch is loaded."""
    check_options(options, world_size)
    from examples.common.images import find_data

    find_data(options, options.global_batch, "--global-batch")
