"""What a user can ask for on the command line, and whether it can be done."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import DEFAULT_RANKS
from slow_flags import add_slow_flags, check_slow
from small_vit import add_vit_flags, check_vit
from usage import OneLineParser, UsageError, add_data_flags, check_file, flag

from colossal_hetero.planner.batches.batch_profile import load_profile

__all__ = ["Choices", "check_choices", "parse_choices"]

STAGES = ("0", "1", "2", "3", "auto")
METHODS = ("uniform", "exact", "both")
PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The command line, one field per flag."""

    nproc: int | None
    slow: str | None
    """None: the default on more than one rank, nobody on one."""
    slow_by: str
    stage: str
    method: str
    profile: Path | None
    data: str
    data_dir: Path | None
    global_batch: int
    epochs: int
    lr: float
    precision: str
    seed: int
    hidden: int
    depth: int
    heads: int
    patch: int
    summary: Path | None

    @property
    def methods(self) -> tuple[str, ...]:
        """Ways to train, in their order."""
        return ("uniform", "exact") if self.method == "both" else (self.method,)

    def as_json(self) -> dict[str, Any]:
        """The choices as JSON can hold them."""
        values = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="train.py",
        description="Train with ZeRO on devices that are not equally fast, with equal batches and with fitted ones.",
        epilog="It starts its own ranks; under torchrun or colossalai run it joins those.",
        allow_abbrev=False,
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--nproc", type=int, metavar="N", help=f"ranks to start (default {DEFAULT_RANKS})")
    add_slow_flags(ranks)

    batches = parser.add_argument_group("batches")
    batches.add_argument(
        "--stage", choices=STAGES, default="1", help="of ZeRO; auto: the lowest at which a sample fits (default 1)"
    )
    batches.add_argument("--global-batch", type=int, metavar="N", default=64, help="images per step (default 64)")
    batches.add_argument(
        "--method",
        choices=METHODS,
        default="both",
        help="uniform: the same for every rank, as Colossal-AI divides; exact: what takes least time; both: one after "
        "the other (default both)",
    )
    batches.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="what each device holds and how long it takes: used if it is there, else measured and written",
    )

    add_data_flags(parser)

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, metavar="N", default=8, help="of each way (default 8)")
    training.add_argument("--lr", type=float, metavar="RATE", default=1e-3, help="peak learning rate (default 1e-3)")
    training.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default fp32")
    training.add_argument("--seed", type=int, metavar="N", default=0, help="default 0")

    add_vit_flags(parser, hidden=256, depth=4, heads=4, patch=8)

    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what was measured, at the end")
    return parser


def parse_choices(arguments: Sequence[str] | None = None) -> Choices:
    """The choices in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return Choices(**vars(_make_parser().parse_args(arguments)))


def check_choices(choices: Choices, world_size: int) -> None:
    """Find what cannot work with ``world_size`` ranks, without torch.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    for name in ("nproc", "global_batch", "epochs"):
        value = getattr(choices, name)
        if value is not None and value < 1:
            raise UsageError(f"{flag(name)} {value} must be at least 1")
    if not (0.0 < choices.lr < math.inf):
        raise UsageError(f"--lr {choices.lr} must be a positive number, for example 1e-3")
    if not 0 <= choices.seed < 2**32:
        raise UsageError(f"--seed {choices.seed} must be between 0 and {2**32 - 1}")
    check_vit(choices)
    if choices.precision == "fp16" and choices.stage == "3":
        raise UsageError("--precision fp16 is not available with --stage 3; use bf16 or fp32")
    if choices.method == "both" and choices.stage == "auto" and choices.profile is not None:
        # One way may then use what the other has measured at another stage.
        raise UsageError("--profile holds for one stage; give it with --stage 0, 1, 2 or 3 rather than auto")
    check_slow(choices.slow, world_size)
    if choices.profile is not None and choices.profile.is_file():
        _check_profile(choices, choices.profile, world_size)
    for name in ("summary", "profile"):
        path = getattr(choices, name)
        if path is not None and not (name == "profile" and path.is_file()):
            check_file(name, path)


def _check_profile(choices: Choices, path: Path, world_size: int) -> None:
    try:
        profile = load_profile(path)
    except ValueError as error:
        raise UsageError(f"--profile {path}: {' '.join(str(error).split())}") from None
    remedy = "delete the file, or name another one, to measure anew"
    if len(profile.ranks) != world_size:
        raise UsageError(f"--profile {path} is of {len(profile.ranks)} ranks, not {world_size}; {remedy}")
    for name, wanted, found in (
        ("stage", choices.stage, str(profile.stage)),
        ("precision", choices.precision, profile.precision),
    ):
        if wanted not in (found, "auto"):
            raise UsageError(f"--profile {path} was made with --{name} {found}, not {wanted}; {remedy}")
