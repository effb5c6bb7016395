"""The command lines of the elastic example, of its training script and of its demonstration, and their checks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.common.options import (
    OneLineParser,
    UsageError,
    VitSizeOptions,
    add_data_flags,
    add_training_flags,
    add_vit_size_flags,
    check_at_least_one,
    check_file,
    check_plot,
    check_training,
    check_vit_sizes,
)

NODES = ("node-0", "node-1", "node-2", "node-3", "node-4")
"""Names of the nodes that may be members."""


KINDS = ("kill", "leave", "join")


@dataclass(frozen=True)
class Action:
    """What the demonstration does to a node."""

    kind: str
    """One of ``KINDS``."""
    node: str
    step: int
    """Number of optimizer steps after which it is done."""


DEFAULT_ACTIONS = (Action("kill", "node-0", 20), Action("join", "node-4", 25))


class ElasticOptions(VitSizeOptions):
    """The command line of either script."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """What happens to nodes, by step."""
        given = [action for kind in KINDS for action in getattr(self, kind)]
        return tuple(sorted(given or DEFAULT_ACTIONS, key=lambda action: action.step))

    def as_json(self) -> dict[str, Any]:
        """The values by name, as summary files hold them."""
        given = {kind: [f"{each.node}:{each.step}" for each in getattr(self, kind)] for kind in KINDS}
        return super().as_json() | given

    @property
    def first_nodes(self) -> tuple[str, ...]:
        """The nodes that are started first."""
        return NODES[: self.nodes]


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    batches = parser.add_argument_group("batches")
    batches.add_argument("--global-batch", type=int, metavar="N", default=64, help="images per step (default 64)")
    batches.add_argument("--micro-batch", type=int, metavar="N", default=4, help="images per micro-batch (default 4)")
    add_data_flags(parser)
    add_training_flags(parser, epochs=6, precisions=("fp32", "fp64"))
    parser.set_defaults(precision="fp64")
    add_vit_size_flags(parser, hidden=96, depth=6, heads=4, patch=8)


def parse_options(arguments: Sequence[str] | None = None) -> ElasticOptions:
    """The options of the training script.

    Raises:
        UsageError: a flag is unknown, or its value is not one that the flag takes.
    """
    parser = OneLineParser(
        "Train a vision transformer as a member of an elastic job.",
        "torchrun starts it on each node.",
    )
    job = parser.add_argument_group("job")
    job.add_argument("--cluster", type=Path, required=True, metavar="FILE.toml", help="all nodes that may be members")
    job.add_argument("--profile", type=Path, required=True, metavar="FILE.json", help="time of each layer")
    job.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="save a checkpoint there after each epoch")
    job.add_argument("--trace", type=Path, metavar="FOLDER", help="write a line for each step into a file there")
    _add_common_flags(parser)
    return parser.parse_args(arguments, namespace=ElasticOptions())


def parse_demo_options(arguments: Sequence[str] | None = None) -> ElasticOptions:
    """The options of the demonstration.

    Raises:
        UsageError: as :func:`parse_options`.
    """
    parser = OneLineParser(
        "Train on four nodes, all on this machine, while one is killed and one joins; compare with training on one.",
        f"Nodes are {', '.join(NODES)}. Without --kill, --leave and --join: --kill node-0:20 --join node-4:25.",
    )
    nodes = parser.add_argument_group("nodes")
    nodes.add_argument("--nodes", type=int, metavar="N", default=4, help="nodes to start with (default 4)")
    for kind, what in (
        ("kill", "kill all processes of a node (kill -9)"),
        ("leave", "warn a node (SIGTERM), which then leaves"),
        ("join", "start a node"),
    ):
        nodes.add_argument(
            f"--{kind}",
            type=lambda text, kind=kind: _action(kind, text),
            action="append",
            default=[],
            metavar="NODE:STEP",
            help=f"{what} after this step; may be repeated",
        )
    _add_common_flags(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what was measured, at the end")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw throughput over time")
    return parser.parse_args(arguments, namespace=ElasticOptions())


def _action(kind: str, text: str) -> Action:
    match = re.fullmatch(r"([^:]+):(\d+)", text)
    if match is None or match[1] not in NODES or int(match[2]) < 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not NODE:STEP; nodes are {', '.join(NODES)}, steps count from 1, for example {NODES[1]}:20"
        )
    return Action(kind, match[1], int(match[2]))


def script_flags(options: ElasticOptions) -> list[str]:
    """The flags of the demonstration that its training script takes too, as a command line."""
    names = ("global_batch", "micro_batch", "data", "data_dir", "epochs", "lr", "precision", "seed")
    values = {name: getattr(options, name) for name in (*names, *options.vit_sizes)}
    return [
        part
        for name, value in values.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


def check_options(options: ElasticOptions) -> None:
    """Find what cannot work in the demonstration, without torch.

    Raises:
        UsageError: names the flag and its value, why it cannot work, and what would.
    """
    check_at_least_one(options, "global_batch", "micro_batch", "epochs")
    check_training(options)
    check_vit_sizes(options)
    if not 2 <= options.nodes <= len(NODES):
        raise UsageError(f"--nodes {options.nodes} is not possible; valid are 2 to {len(NODES)}")
    if options.global_batch % options.micro_batch or options.global_batch < len(NODES) * options.micro_batch:
        raise UsageError(
            f"--micro-batch {options.micro_batch} does not divide --global-batch {options.global_batch} into at least "
            f"{len(NODES)} micro-batches, one for each node; use, for example, --global-batch "
            f"{2 * len(NODES) * options.micro_batch}"
        )
    if options.depth < 2:
        raise UsageError(f"--depth {options.depth} cannot be divided into two stages; use --depth 2 or more")
    _check_actions(options)
    for name in ("summary", "plot"):
        if getattr(options, name) is not None:
            check_file(name, getattr(options, name))
    if options.plot is not None:
        check_plot(options.plot)


def _check_actions(options: ElasticOptions) -> None:
    running = set(options.first_nodes)
    for action in options.actions:
        flag = f"--{action.kind} {action.node}:{action.step}"
        if (action.kind == "join") == (action.node in running):
            state = "runs already" if action.kind == "join" else "does not run"
            others = sorted(set(NODES) - running if action.kind == "join" else running)
            raise UsageError(f"{flag}: this node {state} then; nodes that can {action.kind} are {', '.join(others)}")
        running ^= {action.node}
        if not running:
            raise UsageError(f"{flag} ends the last node; let at least one run on")
