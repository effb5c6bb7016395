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

from colossal_hetero.io.pictures import check_matplotlib, check_name
from colossal_hetero.planner.profile.layer_profile import load_model_profile

__all__ = ["Settings", "check_settings", "parse_settings"]

WAYS = ("uniform", "planned", "both")
METHODS = ("exact", "simulated", "holmes", "adapt", "autohet")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The command line, one field per flag."""

    nproc: int | None
    slow: str | None
    """None: the default on more than one rank, nobody on one."""
    slow_by: str
    way: str
    method: str
    global_batch: int
    micro_batch: int
    profile: Path | None
    data: str
    data_dir: Path | None
    epochs: int
    lr: float
    precision: str
    seed: int
    hidden: int
    depth: int
    heads: int
    patch: int
    summary: Path | None
    plan: Path | None
    plot: Path | None

    @property
    def ways(self) -> tuple[str, ...]:
        """To train, in their order."""
        return ("uniform", "planned") if self.way == "both" else (self.way,)

    @property
    def micro_batches(self) -> int:
        """Of an iteration."""
        return self.global_batch // self.micro_batch

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON can hold them."""
        values = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _make_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="train.py",
        description="Train in a pipeline on devices that are not equally fast, with equal stages and with fitted ones.",
        epilog="It starts its own ranks, one a stage; under torchrun or colossalai run it joins those.",
        allow_abbrev=False,
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--nproc", type=int, metavar="N", help=f"ranks to start, one a stage (default {DEFAULT_RANKS})")
    add_slow_flags(ranks)

    stages = parser.add_argument_group("stages")
    stages.add_argument(
        "--way",
        choices=WAYS,
        default="both",
        help="uniform: equally many blocks per stage, ranks in order, as Colossal-AI divides; planned: measured and "
        "planned; both: one after the other (default both)",
    )
    stages.add_argument("--method", choices=METHODS, default="exact", help="how stages are planned (default exact)")
    stages.add_argument("--global-batch", type=int, metavar="N", default=64, help="images per step (default 64)")
    stages.add_argument("--micro-batch", type=int, metavar="N", default=8, help="images at a time (default 8)")
    stages.add_argument(
        "--profile",
        type=Path,
        metavar="FILE.json",
        help="how long each layer takes on each rank: used if it is there, else measured and written",
    )

    add_data_flags(parser)

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, metavar="N", default=5, help="of each way (default 5)")
    training.add_argument("--lr", type=float, metavar="RATE", default=1e-3, help="peak learning rate (default 1e-3)")
    training.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default fp32")
    training.add_argument("--seed", type=int, metavar="N", default=0, help="default 0")

    add_vit_flags(parser, hidden=128, depth=8, heads=4, patch=4)

    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what was measured, at the end")
    output.add_argument("--plan", type=Path, metavar="FILE.json", help="write the plan")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the plan's schedule")
    return parser


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """The settings in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return Settings(**vars(_make_parser().parse_args(arguments)))


def check_settings(settings: Settings, world_size: int) -> None:
    """Find what cannot work with ``world_size`` ranks, without torch.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    for name in ("nproc", "global_batch", "micro_batch", "epochs"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UsageError(f"{flag(name)} {value} must be at least 1")
    if not (0.0 < settings.lr < math.inf):
        raise UsageError(f"--lr {settings.lr} must be a positive number, for example 1e-3")
    if not 0 <= settings.seed < 2**32:
        raise UsageError(f"--seed {settings.seed} must be between 0 and {2**32 - 1}")
    check_vit(settings)
    if settings.global_batch % settings.micro_batch:
        valid = ", ".join(
            str(size) for size in range(1, settings.global_batch + 1) if settings.global_batch % size == 0
        )
        raise UsageError(
            f"--micro-batch {settings.micro_batch} does not divide --global-batch {settings.global_batch}; "
            f"valid are {valid}"
        )
    if world_size < 2:
        raise UsageError("a pipeline has at least two stages; start more ranks with --nproc 2")
    if settings.depth < world_size:
        raise UsageError(
            f"--depth {settings.depth} blocks cannot make {world_size} stages, one a rank; use --depth {world_size} or "
            "more, or fewer ranks"
        )
    if settings.micro_batches < world_size:
        raise UsageError(
            f"--micro-batch {settings.micro_batch} cuts --global-batch {settings.global_batch} into "
            f"{settings.micro_batches} micro-batch{'es' if settings.micro_batches > 1 else ''}, fewer than the "
            f"{world_size} stages; use --micro-batch {settings.global_batch // world_size} or less"
        )
    check_slow(settings.slow, world_size)
    _check_files(settings)


def _check_files(settings: Settings) -> None:
    if settings.profile is not None and settings.profile.is_file():
        try:
            load_model_profile(settings.profile)
        except ValueError as error:
            raise UsageError(f"--profile {settings.profile}: {' '.join(str(error).split())}") from None
    for name in ("summary", "plan", "plot", "profile"):
        path = getattr(settings, name)
        if path is not None and not (name == "profile" and path.is_file()):
            check_file(name, path)
    if settings.plot is not None:
        try:
            check_name(settings.plot)
            check_matplotlib()
        except (ValueError, ImportError) as error:
            raise UsageError(f"--plot {settings.plot}: {error}") from None
    if settings.way == "uniform":
        for name in ("plan", "plot"):
            if getattr(settings, name) is not None:
                raise UsageError(f"{flag(name)} needs a plan, which --way uniform does not make; use --way planned")
