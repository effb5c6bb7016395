"""The command line of the ViT example, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence

from colossal_hetero.planner.profile.estimate import VITS
from examples.common.options import (
    IMAGE_SIZE,
    OneLineParser,
    UsageError,
    add_data_flags,
    add_ranks_flag,
    add_training_flags,
    check_patch,
)
from examples.common.tensor_parallel import (
    Layout,
    TensorParallelOptions,
    add_balance_flags,
    add_batch_flags,
    add_output_flags,
    add_plugin_flags,
    check_model_sizes,
)

DEFAULT_SHAPE = {"hidden": 384, "depth": 2, "heads": 8, "patch": 8}


class VitOptions(TensorParallelOptions):
    """The command line. ``model`` names a timm model or stands for sizes, or the sizes are given; None where a flag was
    not given."""

    @property
    def has_sizes(self) -> bool:
        """Whether the model is described by sizes, and not by the name of a timm model."""
        return self.model is None or self.model in VITS

    def size(self, name: str) -> int:
        """``hidden``, ``depth``, ``heads`` or ``patch``, or its default; for models that are described by sizes."""
        value = getattr(self, name)
        if value is not None:
            return value
        return DEFAULT_SHAPE[name] if self.model is None else getattr(VITS[self.model], name)

    @property
    def vit_sizes(self) -> dict[str, int]:
        """All sizes by name."""
        return {name: self.size(name) for name in DEFAULT_SHAPE}


def _make_parser() -> OneLineParser:
    parser = OneLineParser(
        "Train a vision transformer with tensor parallelism on devices that are not equally fast.",
        "It starts its own ranks; under torchrun or colossalai run it joins those.",
    )
    ranks = add_ranks_flag(parser)
    ranks.add_argument("--pp", type=int, metavar="N", default=1, help="pipeline stages (default 1)")
    add_plugin_flags(ranks)
    model = parser.add_argument_group("model", "either a name or sizes")
    model.add_argument(
        "--model",
        metavar="NAME",
        help=f"a timm VisionTransformer, for example vit_tiny_patch16_224; or SEMI's {' or '.join(VITS)}",
    )
    for name, what in (("hidden", "embedding width"), ("depth", "blocks"), ("heads", "attention heads")):
        model.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default {DEFAULT_SHAPE[name]})")
    model.add_argument(
        "--patch",
        type=int,
        metavar="N",
        help=f"patch size in pixels; images are {IMAGE_SIZE} × {IMAGE_SIZE} (default {DEFAULT_SHAPE['patch']}, or the "
        "named model's)",
    )
    add_data_flags(parser)
    training = add_training_flags(parser, epochs=20)
    add_batch_flags(training, 64, "images")
    add_balance_flags(parser)
    add_output_flags(parser)
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> VitOptions:
    """The options in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return _make_parser().parse_args(arguments, namespace=VitOptions())


def check_options(options: VitOptions, world_size: int) -> Layout:
    """Find what cannot work with ``world_size`` ranks, without torch, and return how the ranks are divided.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    options.check_numbers("pp", "hidden", "depth", "heads", "patch")
    if options.patch is not None:
        check_patch(options.patch)
    layout = options.layout(world_size, options.pp)
    given = [f"--{name}" for name in ("hidden", "depth", "heads") if getattr(options, name) is not None]
    if options.model is not None and given:
        raise UsageError(f"{', '.join(given)} cannot be combined with --model {options.model}, which has its own sizes")
    if options.has_sizes:
        _check_sizes(options, layout)
    options.check_balancing(layout)
    return layout


def _check_sizes(options: VitOptions, layout: Layout) -> None:
    hidden, heads = options.size("hidden"), options.size("heads")
    if hidden % heads:
        raise UsageError(f"--heads {heads} does not divide --hidden {hidden}; use a divisor of {hidden}")
    name = options.model or "this model"
    check_model_sizes(name, {"heads": {heads}, "MLP features": {4 * hidden}}, options.size("depth"), layout)


def check(options: VitOptions, world_size: int) -> None:
    """:func:`check_options`, and whether there are enough data and such a model, for which torch is loaded."""
    layout = check_options(options, world_size)
    from examples.common.images import find_data
    from examples.vit.model import check_model

    find_data(options, options.batch_size)
    check_model(options, layout)
