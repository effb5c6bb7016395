"""The command line of the language example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from examples.common.options import OneLineParser, UsageError, add_ranks_flag, add_training_flags
from examples.common.tensor_parallel import (
    Layout,
    TensorParallelOptions,
    add_balance_flags,
    add_batch_flags,
    add_output_flags,
    add_plugin_flags,
    check_model_sizes,
)


class LanguageOptions(TensorParallelOptions):
    """The command line."""

    save_in: Path | None
    save_every: int
    resume: bool


def _make_parser() -> OneLineParser:
    parser = OneLineParser(
        "Train a GPT-2 from a configuration with tensor parallelism on devices that are not equally fast.",
        "It starts its own ranks; under torchrun or colossalai run it joins those.",
    )
    add_plugin_flags(add_ranks_flag(parser))
    model = parser.add_argument_group("model", "a GPT-2 that reads bytes")
    for name, default, what in (
        ("hidden", 256, "embedding width"),
        ("depth", 2, "blocks"),
        ("heads", 8, "attention heads"),
        ("context", 64, "bytes that the model sees at a time"),
    ):
        model.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default {default})")
    add_batch_flags(add_training_flags(parser, epochs=1), 32, "pieces of text")
    add_balance_flags(parser)
    add_output_flags(parser)
    checkpoints = parser.add_argument_group("layer checkpoints", "which a run with another --tp or --nproc can load")
    checkpoints.add_argument("--save-in", type=Path, metavar="DIR", help="save layer checkpoints in this folder")
    checkpoints.add_argument(
        "--save-every", type=int, metavar="N", default=1, help="save after every N epochs (default 1)"
    )
    checkpoints.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --save-in, if there is one"
    )
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> LanguageOptions:
    """The options in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return _make_parser().parse_args(arguments, namespace=LanguageOptions())


def check_options(options: LanguageOptions, world_size: int) -> Layout:
    """Find what cannot work with ``world_size`` ranks, without torch, and return how the ranks are divided.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    options.check_numbers("hidden", "depth", "heads", "context", "save_every")
    layout = options.layout(world_size)
    if options.hidden % options.heads:
        raise UsageError(f"--heads {options.heads} does not divide --hidden {options.hidden}; use a divisor of it")
    if options.context < 2:
        raise UsageError("--context 1 leaves nothing to predict from; use at least 2")
    check_model_sizes("this model", {"heads": {options.heads}}, options.depth, layout)
    options.check_balancing(layout)
    if options.resume and options.save_in is None:
        raise UsageError("--resume needs --save-in, the folder with the checkpoints")
    if options.save_in is not None and options.plugin != "hetero":
        raise UsageError(f"--save-in {options.save_in} needs --plugin hetero, not {options.plugin}")
    return layout
