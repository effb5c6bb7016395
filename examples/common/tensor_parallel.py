"""Flags of the tensor-parallel examples: the plugin, balancing, stragglers and output files."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from colossal_hetero.balance.config import PAPER_METHODS, BalanceConfig, Migration, Mode, Pruning
from colossal_hetero.common.text import parse_rank_factors

from .options import Options, UsageError, attempt, check_at_least_one, check_file, check_training, flag

if TYPE_CHECKING:
    from colossal_hetero.testing.stragglers import Stragglers


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided: tensor-parallel groups of consecutive ranks, stages, data-parallel replicas."""

    tp: int
    pp: int
    dp: int
    local_batch: int
    """Samples of one iteration that a replica works on."""
    microbatches: int
    """Parts that a replica's batch is cut into for the pipeline; 1 without a pipeline."""

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def tp_groups(self) -> list[list[int]]:
        """The tensor-parallel groups as lists of global ranks."""
        return [list(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)]


class TensorParallelOptions(Options):
    """The command line of an example with tensor parallelism."""

    def balance_config(self) -> BalanceConfig:
        """The plugin's ``balance``.

        Raises:
            UsageError: a value is outside the range that :class:`BalanceConfig` accepts.
        """
        mode = self.balance
        try:
            if self.paper is not None:
                if mode != "off":
                    raise UsageError(f"--paper {self.paper} and --balance {mode} exclude each other; leave one out")
                seed = {} if self.paper == "mig" else {"seed": self.seed}
                return BalanceConfig.paper(self.paper, **seed, max_resize=self.max_resize)
            chosen: dict[str, Any] = {"mode": mode, "max_resize": self.max_resize}
            # What a mode does not use is left out, so that the same flags can be tried with all modes.
            if mode in ("resize", "semi") or (mode == "auto" and self.max_resize):
                chosen["pruning"] = Pruning(seed=self.seed)
            if mode in ("migrate", "semi", "auto"):
                chosen["migration"] = self.migration
            return BalanceConfig(**chosen)
        except ValueError as error:
            raise UsageError(_in_flags(str(error))) from None

    @property
    def balancing(self) -> str:
        """The flag that asks for balancing; empty if none does."""
        if self.paper is not None:
            return f"--paper {self.paper}"
        return "" if self.balance == "off" else f"--balance {self.balance}"

    def stragglers(self, world_size: int) -> Stragglers | None:
        """The ranks to slow down; None without ``--straggler``.

        Raises:
            UsageError: a rank does not exist, or a factor is below 1.
        """
        if self.straggler is None:
            return None
        from colossal_hetero.testing.stragglers import Stragglers  # here: it loads torch

        try:
            return Stragglers(
                slowdowns=parse_rank_factors(self.straggler),
                schedule=self.straggler_schedule,
                period=self.straggler_period,
                seed=self.seed,
                world_size=world_size,
            )
        except ValueError as error:
            raise UsageError(f"--straggler {self.straggler}: {error}") from None

    def layout(self, world_size: int, pp: int = 1) -> Layout:
        """How ``world_size`` ranks are divided with ``pp`` pipeline stages.

        Raises:
            UsageError: the ranks, or the batch, cannot be divided like this.
        """
        if world_size % pp:
            raise UsageError(f"--pp {pp} does not divide the {world_size} ranks; start a multiple of {pp} with --nproc")
        tp = self.tp or world_size // pp
        if world_size % (tp * pp):
            raise UsageError(
                f"--tp {tp} × --pp {pp} = {tp * pp} does not divide the {world_size} ranks; start a multiple of "
                f"{tp * pp} with --nproc, or lower --tp"
            )
        dp = world_size // (tp * pp)
        if self.batch_size % dp:
            raise UsageError(
                f"--batch-size {self.batch_size} cannot be shared by {dp} data-parallel replicas; use a multiple of "
                f"{dp}"
            )
        local = self.batch_size // dp
        microbatches = 1
        if pp > 1:
            fitting = [count for count in range(pp, 2 * pp + 1) if local % count == 0]
            if not fitting:
                raise UsageError(
                    f"--batch-size {self.batch_size} is {local} samples per replica, which cannot be cut into "
                    f"micro-batches for --pp {pp}; use a multiple of {dp * pp}"
                )
            microbatches = fitting[-1]
        return Layout(tp, pp, dp, local, microbatches)

    def check_numbers(self, *names: str) -> None:
        """Raise ``UsageError`` if one of ``names`` is below 1, or the learning rate or the seed cannot be used."""
        check_at_least_one(self, "nproc", "tp", "batch_size", "epochs", "steps", *names)
        check_training(self)

    def check_balancing(self, layout: Layout) -> None:
        """Raise ``UsageError`` if balancing, a straggler or an output file is not possible with these options."""
        self.balance_config()
        if self.balancing:
            if self.plugin != "hetero":
                raise UsageError(f"{self.balancing} needs --plugin hetero; --plugin {self.plugin} cannot balance")
            if layout.tp == 1:
                raise UsageError(
                    f"{self.balancing} has nothing to balance with --tp 1; use at least two tensor-parallel ranks"
                )
        if self.straggler is not None:
            if self.plugin != "hetero":
                raise UsageError(
                    f"--straggler {self.straggler} is not possible with --plugin {self.plugin}; "
                    "--plugin hetero --balance off is the baseline without balancing"
                )
            if layout.tp == 1:
                raise UsageError(
                    f"--straggler {self.straggler} slows tensor-parallel layers, and --tp 1 has none; use at least "
                    "--tp 2"
                )
            self.stragglers(layout.world_size)
        self._check_output()

    def _check_output(self) -> None:
        if self.summary is not None:
            check_file("summary", self.summary)
        if (folder := self.checkpoint) is not None:
            attempt(f"--checkpoint {folder} cannot be created", lambda: folder.mkdir(parents=True, exist_ok=True))
            attempt(f"--checkpoint {folder} cannot be written", lambda: tempfile.TemporaryFile(dir=folder).close())


def _in_flags(message: str) -> str:
    """``max_resize=2 is …`` as ``--max-resize 2 is …``."""
    return re.sub(r"\b(max_resize|migration)=", lambda match: f"{flag(match[1])} ", message)


def add_plugin_flags(group: argparse._ArgumentGroup) -> None:
    """Add ``--tp`` and ``--plugin``."""
    group.add_argument("--tp", type=int, metavar="N", help="tensor-parallel ranks per group (default: all / stages)")
    group.add_argument(
        "--plugin",
        choices=("hetero", "colossalai"),
        default="hetero",
        help="this project's plugin, or Colossal-AI's own as the baseline (default hetero)",
    )


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


def add_batch_flags(group: argparse._ArgumentGroup, batch_size: int, samples: str) -> None:
    """Add ``--batch-size`` and ``--steps``."""
    what = f"{samples} per iteration (default {batch_size})"
    group.add_argument("--batch-size", type=int, metavar="N", default=batch_size, help=what)
    group.add_argument("--steps", type=int, metavar="N", help="stop after this many iterations in total")


def add_balance_flags(parser: argparse.ArgumentParser) -> None:
    """Add what to do about slow ranks, and which ranks to make slow."""
    balancing = parser.add_argument_group("balancing")
    balancing.add_argument(
        "--balance",
        choices=get_args(Mode),
        default="off",
        help="off: measure only; resize: prune on slow ranks; migrate: give their work to the others; semi: both; "
        "auto: whatever takes the least time, pruning no more than --max-resize allows (default off)",
    )
    balancing.add_argument(
        "--paper",
        choices=PAPER_METHODS,
        help="a method as SEMI describes it, in place of --balance: zero-rd, zero-pri and zero-pridiff-r or -e prune "
        "columns; mig migrates them; semi is both",
    )
    balancing.add_argument(
        "--migration",
        choices=get_args(Migration),
        default="block",
        help="what is given away: units of a block (neurons, heads), or columns of each product, all of them sent to "
        "every rank (broadcast-reduce) or to each receiver its part (scatter-gather) (default block)",
    )
    balancing.add_argument(
        "--max-resize",
        type=float,
        metavar="SHARE",
        help="largest share that a rank may prune (default 0.9; with --balance auto never to prune)",
    )
    stragglers = parser.add_argument_group("stragglers")
    stragglers.add_argument(
        "--straggler", metavar="RANK:FACTOR[,…]", help="make ranks slower, for example 1:4 for rank 1 four times"
    )
    stragglers.add_argument(
        "--straggler-schedule",
        choices=("constant", "round-robin", "random"),
        default="constant",
        help="which ranks are slow: always the same, the next rank in each period, or random ranks in each period "
        "(default constant)",
    )
    stragglers.add_argument(
        "--straggler-period",
        choices=("iteration", "epoch"),
        default="epoch",
        help="period of the schedule (default epoch)",
    )


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Add the files that a run writes."""
    output = parser.add_argument_group("output")
    output.add_argument("--summary", type=Path, metavar="FILE.json", help="write what the run measured, at its end")
    output.add_argument("--checkpoint", type=Path, metavar="DIR", help="save the trained model's weights")
