"""The command line of the pipeline example, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colossal_hetero.planner.profile.layer_profile import load_profile
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
    check_at_least_one,
    check_comparison,
    check_outputs,
    check_plot,
    existing_profile,
    flag,
)


class PipelineOptions(ComparisonOptions):
    """See :class:`ComparisonOptions`."""

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways to make stages that are trained with, in their order."""
        pairs = {"both": ("uniform", "planned"), "replicas": ("equal", "any")}
        return pairs.get(self.way, (self.way,))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an iteration."""
        return self.global_batch // self.micro_batch


def _make_parser() -> OneLineParser:
    parser = OneLineParser(
        "Train in a pipeline on devices that are not equally fast, with equal stages and with fitted ones.",
        "It starts its own ranks, one per stage; under torchrun or colossalai run it joins those.",
    )
    add_straggler_flags(add_ranks_flag(parser, ", one per stage"))
    stages = parser.add_argument_group("stages")
    stages.add_argument(
        "--way",
        choices=("uniform", "planned", "both", "replicas"),
        default="both",
        help="uniform: equally many blocks per stage, ranks in order, as Colossal-AI divides; planned: measured and "
        "planned; both: one after the other; replicas: equal replicas, then any, both planned (default both)",
    )
    stages.add_argument(
        "--method",
        choices=("exact", "holmes", "adapt", "autohet"),
        default="exact",
        help="how stages are planned (default exact)",
    )
    add_global_batch_flag(stages)
    stages.add_argument("--micro-batch", type=int, metavar="N", default=8, help="images per micro-batch (default 8)")
    add_profile_flag(stages, "time of each layer on each rank")
    add_data_flags(parser)
    add_training_flags(parser, epochs=5, what="epochs of each way", precisions=("fp32", "bf16"))
    add_vit_size_flags(parser, hidden=128, depth=8, heads=4, patch=4)
    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what was measured, at the end")
    output.add_argument("--plan", type=Path, metavar="FILE.json", help="write the plan")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the plan's schedule")
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> PipelineOptions:
    """The options in ``arguments``, by default those of the process.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    return _make_parser().parse_args(arguments, namespace=PipelineOptions())


def check_options(options: PipelineOptions, world_size: int) -> None:
    """Find what cannot work with ``world_size`` ranks, without torch.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    check_comparison(options, world_size)
    check_at_least_one(options, "micro_batch")
    if options.global_batch % options.micro_batch:
        valid = ", ".join(str(size) for size in range(1, options.global_batch + 1) if options.global_batch % size == 0)
        raise UsageError(
            f"--micro-batch {options.micro_batch} does not divide --global-batch {options.global_batch}; "
            f"valid are {valid}"
        )
    if world_size < 2:
        raise UsageError("a pipeline has at least two stages; start more ranks with --nproc 2")
    if options.depth < world_size:
        raise UsageError(
            f"--depth {options.depth} blocks cannot make {world_size} stages, one per rank; use --depth {world_size} "
            "or more, or fewer ranks"
        )
    if options.micro_batches < world_size:
        raise UsageError(
            f"--micro-batch {options.micro_batch} cuts --global-batch {options.global_batch} into "
            f"{options.micro_batches} micro-batch{'es' if options.micro_batches > 1 else ''}, fewer than the "
            f"{world_size} stages; use --micro-batch {options.global_batch // world_size} or less"
        )
    _check_files(options)


def _check_files(options: PipelineOptions) -> None:
    existing_profile(options, load_profile)
    check_outputs(options, "summary", "plan", "plot", "profile")
    if options.plot is not None:
        check_plot(options.plot)
    if options.way == "uniform":
        for name in ("plan", "plot"):
            if getattr(options, name) is not None:
                raise UsageError(f"{flag(name)} needs a plan, which --way uniform does not make; use --way planned")


def check(options: PipelineOptions, world_size: int) -> None:
    """:func:`check_options`, and whether there is enough data, for which torch is loaded."""
    check_options(options, world_size)
    from examples.common.images import find_data

    find_data(options, options.global_batch, "--global-batch")
