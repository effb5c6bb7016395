"""What a user can ask for on the command line, and whether it can be done."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from launch import DEFAULT_RANKS
from usage import IMAGE_SIZE, OneLineParser, UsageError, add_data_flags, attempt, check_file, flag

from colossal_hetero.balance.config import BalanceConfig, Imputation, Migration, Mode, Priority, Reference, Resizing
from colossal_hetero.balance.report.picture import FORMATS, check_matplotlib

__all__ = ["Layout", "Options", "check_options", "parse_options"]

DEFAULT_SHAPE = {"hidden": 384, "depth": 2, "heads": 8, "patch": 8}
PRECISIONS = ("fp32", "bf16", "fp16")
SCHEDULES = ("constant", "round-robin", "random")
PERIODS = ("iteration", "epoch")
MEANS = ("repeat", "sleep")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, one field per flag; ``None`` where a flag was not given and its default depends on others."""

    nproc: int | None
    tp: int | None
    pp: int
    plugin: str
    model: str | None
    hidden: int | None
    depth: int | None
    heads: int | None
    patch: int | None
    data: str
    data_dir: Path | None
    batch_size: int
    epochs: int
    steps: int | None
    lr: float
    precision: str
    seed: int
    balance: str
    migration: str
    resizing: str
    priority: str
    imputation: str
    resize_ratio: str
    max_resize: float | None
    reference: str
    straggler: str | None
    straggler_schedule: str
    straggler_period: str
    straggler_means: str
    summary: Path | None
    trace: Path | None
    plot: Path | None
    chrome_trace: Path | None
    tensorboard: Path | None
    checkpoint: Path | None

    def shape(self, name: str) -> int:
        """``hidden``, ``depth``, ``heads`` or ``patch``, or its default; for models without a timm name."""
        value = getattr(self, name)
        return DEFAULT_SHAPE[name] if value is None else value

    def balance_config(self) -> BalanceConfig:
        """What the plugin is told about balancing.

        Raises:
            UsageError: a value is outside what :class:`BalanceConfig` takes.
        """
        try:
            ratio = "auto" if self.resize_ratio == "auto" else float(self.resize_ratio)
        except ValueError:
            raise UsageError(f"--resize-ratio {self.resize_ratio} is neither auto nor a number in [0, 1)") from None
        try:
            return BalanceConfig(
                mode=self.balance,  # type: ignore[arg-type]
                migration=self.migration,  # type: ignore[arg-type]
                resizing=self.resizing,  # type: ignore[arg-type]
                priority=self.priority,  # type: ignore[arg-type]
                imputation=self.imputation,  # type: ignore[arg-type]
                resize_ratio=ratio,  # type: ignore[arg-type]
                max_resize=self.max_resize,
                reference=self.reference,  # type: ignore[arg-type]
                seed=self.seed,
            )
        except ValueError as error:
            raise UsageError(_in_flags(str(error))) from None

    def as_json(self) -> dict[str, Any]:
        """The options as JSON can hold them."""
        values = dataclasses.asdict(self)
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided: tensor-parallel groups of consecutive ranks, stages, data-parallel replicas."""

    tp: int
    pp: int
    dp: int
    local_batch: int
    """Images of one iteration that a replica works on."""
    microbatches: int
    """Parts that a replica's batch is cut into for the pipeline; 1 without one."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tp_groups(self) -> list[list[int]]:
        """The tensor-parallel groups as lists of global ranks."""
        return [list(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)]


def _make_parser() -> argparse.ArgumentParser:
    balance = {field.name: field.default for field in dataclasses.fields(BalanceConfig)}
    parser = OneLineParser(
        prog="train.py",
        description="Train a vision transformer with tensor parallelism on devices that are not equally fast.",
        epilog="It starts its own ranks; under torchrun or colossalai run it joins those.",
        allow_abbrev=False,
    )
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--nproc", type=int, metavar="N", help=f"ranks to start (default {DEFAULT_RANKS})")
    ranks.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks per group (default: all / pp)")
    ranks.add_argument("--pp", type=int, metavar="N", default=1, help="pipeline stages (default 1)")
    ranks.add_argument(
        "--plugin",
        choices=("hetero", "colossalai"),
        default="hetero",
        help="this project's plugin, or Colossal-AI's own as the baseline (default hetero)",
    )

    model = parser.add_argument_group("model", "either a timm name or sizes")
    model.add_argument("--model", metavar="NAME", help="a timm VisionTransformer, for example vit_tiny_patch16_224")
    for name, what in (("hidden", "embedding width"), ("depth", "blocks"), ("heads", "attention heads")):
        model.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default {DEFAULT_SHAPE[name]})")
    model.add_argument(
        "--patch",
        type=int,
        metavar="N",
        help=f"patch size in pixels; images are {IMAGE_SIZE} × {IMAGE_SIZE} (default {DEFAULT_SHAPE['patch']}, or the "
        "timm model's)",
    )

    add_data_flags(parser)

    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, metavar="N", default=64, help="images per iteration (default 64)")
    training.add_argument("--epochs", type=int, metavar="N", default=20, help="default 20")
    training.add_argument("--steps", type=int, metavar="N", help="stop after this many iterations in total")
    training.add_argument("--lr", type=float, metavar="RATE", default=1e-3, help="peak learning rate (default 1e-3)")
    training.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default fp32")
    training.add_argument("--seed", type=int, metavar="N", default=0, help="default 0")

    balancing = parser.add_argument_group("balancing")
    balancing.add_argument(
        "--balance",
        choices=get_args(Mode),
        default=balance["mode"],
        help="off measures only; resize prunes on slow ranks; migrate gives their work to the others; semi does both; "
        "auto does what costs least and prunes no more than --max-resize allows (default off)",
    )
    balancing.add_argument(
        "--migration",
        choices=get_args(Migration),
        default=balance["migration"],
        help="what is given away: units of a block (neurons, heads), or columns of each product, all sent to everyone "
        f"or to each its own (default {balance['migration']})",
    )
    balancing.add_argument(
        "--resizing",
        choices=get_args(Resizing),
        default=balance["resizing"],
        help=f"what is pruned: columns of each product, or units of a block (default {balance['resizing']})",
    )
    balancing.add_argument(
        "--priority",
        choices=get_args(Priority),
        default=balance["priority"],
        help=f"which columns are pruned (default {balance['priority']})",
    )
    balancing.add_argument(
        "--imputation",
        choices=get_args(Imputation),
        default=balance["imputation"],
        help=f"what gradients hold at pruned columns (default {balance['imputation']})",
    )
    balancing.add_argument(
        "--resize-ratio",
        metavar="auto|SHARE",
        default=str(balance["resize_ratio"]),
        help="share of its columns that a slow rank prunes (default auto: by its measured time)",
    )
    balancing.add_argument(
        "--max-resize",
        type=float,
        metavar="SHARE",
        help="largest share that a rank may prune (default 0.9; with --balance auto 0: never)",
    )
    balancing.add_argument(
        "--reference",
        choices=get_args(Reference),
        default=balance["reference"],
        help=f"the time that slow ranks are brought down to (default {balance['reference']})",
    )

    stragglers = parser.add_argument_group("stragglers to order")
    stragglers.add_argument(
        "--straggler", metavar="RANK:SLOWDOWN[,…]", help="make ranks slower, for example 1:4 for rank 1 four times"
    )
    stragglers.add_argument(
        "--straggler-schedule",
        choices=SCHEDULES,
        default="constant",
        help="who is slow: always the same, the next rank each period, or ranks drawn anew (default constant)",
    )
    stragglers.add_argument(
        "--straggler-period", choices=PERIODS, default="epoch", help="of the schedule (default epoch)"
    )
    stragglers.add_argument(
        "--straggler-means",
        choices=MEANS,
        default="repeat",
        help="do each product again and again, or pause after it (default repeat)",
    )

    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what the run measured, at its end")
    output.add_argument("--trace", type=Path, metavar="FILE.jsonl", help="write a line per iteration")
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw an iteration before and after balancing (needs matplotlib)"
    )
    output.add_argument(
        "--chrome-trace", type=Path, metavar="FILE.json", help="write the same two iterations for ui.perfetto.dev"
    )
    output.add_argument("--tensorboard", type=Path, metavar="DIR", help="log for TensorBoard")
    output.add_argument("--checkpoint", type=Path, metavar="DIR", help="save the trained model's weights")
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The options in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return Options(**vars(_make_parser().parse_args(arguments)))


def check_options(options: Options, world_size: int) -> Layout:
    """Find what cannot work with ``world_size`` ranks, without torch, and return how the ranks are divided.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    _check_numbers(options)
    layout = _check_layout(options, world_size)
    if options.model is None:
        _check_shape(options, layout)
    elif given := [f"--{name}" for name in ("hidden", "depth", "heads") if getattr(options, name) is not None]:
        raise UsageError(f"{', '.join(given)} cannot be combined with --model {options.model}, which has its own sizes")
    _check_balance(options, layout)
    _check_stragglers(options, layout)
    _check_output(options)
    return layout


def check_model_sizes(name: str, sizes: dict[str, set[int]], depth: int, layout: Layout) -> None:
    """Find whether ``layout`` can share a model whose heads and MLP widths are ``sizes``.

    Raises:
        UsageError: ``tp`` does not divide a size, or there are more stages than blocks.
    """
    for what, values in sizes.items():
        for value in sorted(values):
            if value % layout.tp:
                common = math.gcd(*(size for sizes_ in sizes.values() for size in sizes_))
                valid = ", ".join(str(divisor) for divisor in range(1, common + 1) if common % divisor == 0)
                raise UsageError(f"--tp {layout.tp} does not divide the {value} {what} of {name}; valid are {valid}")
    if depth < layout.pp:
        raise UsageError(f"--pp {layout.pp} needs at least as many blocks; {name} has {depth}")


def _check_numbers(options: Options) -> None:
    for name in (
        *("nproc", "tp", "pp", "hidden", "depth", "heads", "patch"),
        *("batch_size", "epochs", "steps"),
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{flag(name)} {value} must be at least 1")
    if not (0.0 < options.lr < math.inf):
        raise UsageError(f"--lr {options.lr} must be a positive number, for example 1e-3")
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"--seed {options.seed} must be between 0 and {2**32 - 1}")
    if options.patch is not None and IMAGE_SIZE % options.patch:
        valid = ", ".join(str(size) for size in range(1, IMAGE_SIZE + 1) if IMAGE_SIZE % size == 0)
        raise UsageError(
            f"--patch {options.patch} does not divide the image size {IMAGE_SIZE} × {IMAGE_SIZE}; valid are {valid}"
        )


def _check_layout(options: Options, world_size: int) -> Layout:
    pp = options.pp
    if world_size % pp:
        raise UsageError(f"--pp {pp} does not divide the {world_size} ranks; start a multiple of {pp} with --nproc")
    tp = options.tp or world_size // pp
    if world_size % (tp * pp):
        raise UsageError(
            f"--tp {tp} × --pp {pp} = {tp * pp} does not divide the {world_size} ranks; start a multiple of {tp * pp} "
            "with --nproc, or lower --tp"
        )
    dp = world_size // (tp * pp)
    if options.batch_size % dp:
        raise UsageError(
            f"--batch-size {options.batch_size} cannot be shared by {dp} data-parallel replicas; use a multiple of {dp}"
        )
    local = options.batch_size // dp
    microbatches = 1
    if pp > 1:
        fitting = [count for count in range(pp, 2 * pp + 1) if local % count == 0]
        if not fitting:
            raise UsageError(
                f"--batch-size {options.batch_size} is {local} images per replica, which cannot be cut into "
                f"micro-batches for --pp {pp}; use a multiple of {dp * pp}"
            )
        microbatches = fitting[-1]
    return Layout(tp, pp, dp, local, microbatches)


def _check_shape(options: Options, layout: Layout) -> None:
    hidden, heads = options.shape("hidden"), options.shape("heads")
    if hidden % heads:
        raise UsageError(f"--heads {heads} does not divide --hidden {hidden}; use a divisor of {hidden}")
    check_model_sizes("this model", {"heads": {heads}, "MLP features": {4 * hidden}}, options.shape("depth"), layout)


def _check_balance(options: Options, layout: Layout) -> None:
    options.balance_config()
    if options.balance == "off":
        return
    if options.plugin != "hetero":
        raise UsageError(f"--balance {options.balance} needs --plugin hetero; --plugin {options.plugin} cannot balance")
    if layout.tp == 1:
        raise UsageError(
            f"--balance {options.balance} has nothing to balance with --tp 1; use at least two tensor-parallel ranks"
        )


def _check_stragglers(options: Options, layout: Layout) -> None:
    if options.straggler is None:
        return
    if options.plugin != "hetero":
        raise UsageError(
            f"--straggler {options.straggler} cannot be ordered with --plugin {options.plugin}; "
            "--plugin hetero --balance off is the baseline without balancing"
        )
    if layout.tp == 1:
        raise UsageError(
            f"--straggler {options.straggler} slows tensor-parallel layers, and --tp 1 has none; use at least --tp 2"
        )
    from colossal_hetero.testing.stragglers import Stragglers, parse_slowdowns

    try:
        Stragglers(slowdowns=parse_slowdowns(options.straggler), world_size=layout.world_size)
    except ValueError as error:
        raise UsageError(f"--straggler {options.straggler}: {error}") from None


def _check_output(options: Options) -> None:
    for name in ("summary", "trace", "plot", "chrome_trace"):
        path = getattr(options, name)
        if path is None:
            continue
        check_file(name, path)
        if name in ("plot", "chrome_trace") and options.plugin != "hetero":
            raise UsageError(
                f"{flag(name)} {path} needs --plugin hetero; --plugin {options.plugin} does not measure its ranks"
            )
    if options.plot is not None:
        _check_plot(options.plot)
    for name in ("tensorboard", "checkpoint"):
        path = getattr(options, name)
        if path is not None:
            attempt(f"--{name} {path} cannot be created", lambda path=path: path.mkdir(parents=True, exist_ok=True))
            attempt(f"--{name} {path} cannot be written", lambda path=path: tempfile.TemporaryFile(dir=path).close())
    if options.tensorboard is not None:
        try:
            importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise UsageError(
                f"--tensorboard {options.tensorboard} needs the package tensorboard, which cannot be imported "
                f"({error}); pip install tensorboard"
            ) from None


def _check_plot(path: Path) -> None:
    if path.suffix[1:].lower() not in FORMATS:
        raise UsageError(f"--plot {path} is of no kind that can be drawn; end the name in .{', .'.join(FORMATS)}")
    try:
        check_matplotlib()
    except ImportError as error:
        raise UsageError(f"--plot {path}: {error}") from None


def _in_flags(message: str) -> str:
    """``resize_ratio=2 is …`` as ``--resize-ratio 2 is …``."""
    names = "|".join(field.name for field in dataclasses.fields(Options))
    return re.sub(rf"\b({names})=", lambda match: f"{flag(match[1])} ", message)
