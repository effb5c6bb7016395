"""Train in a pipeline of which one device becomes slow in mid-run: layers leave it, and come back afterwards.

    python examples/pipeline/follow.py --plot follow.png

starts two ranks on this machine, and slows the second in the middle third of the run. ``--help`` lists the flags.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

from examples.common.launch import run_command
from examples.common.options import (
    OneLineParser,
    Options,
    UsageError,
    add_ranks_flag,
    check_at_least_one,
    check_outputs,
    check_plot,
    check_stragglers,
    slowdowns,
)


def parse_options() -> Options:
    parser = OneLineParser(
        "Train in a pipeline of which one device becomes slow in mid-run.", "It starts its own ranks."
    )
    ranks = add_ranks_flag(parser, ", one per stage")
    ranks.add_argument("--straggler", metavar="RANK:FACTOR", default="1:3", help="the rank that becomes slow (1:3)")
    ranks.add_argument("--fixed", action="store_true", help="layers stay where they are, for comparison")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--iterations", type=int, metavar="N", default=120, help="a third of them slowed (default 120)")
    sizes.add_argument("--depth", type=int, metavar="N", default=8, help="blocks of the ViT (default 8)")
    sizes.add_argument("--hidden", type=int, metavar="N", default=128, help="width of the ViT (default 128)")
    sizes.add_argument("--micro-batch", type=int, metavar="N", default=4, help="images, 8 times per iteration (4)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the time of each iteration")
    return parser.parse_args(namespace=Options())


def check(options: Options, world_size: int) -> None:
    check_at_least_one(options, "iterations", "micro_batch", "hidden")
    check_outputs(options, "plot")
    if options.plot is not None:
        check_plot(options.plot)
    if world_size < 2 or options.depth < world_size:
        raise UsageError(
            f"--depth {options.depth} blocks on {world_size} ranks make no pipeline; it has at least two stages, of at "
            "least a block each"
        )
    check_stragglers(options.straggler, world_size)


if __name__ == "__main__":
    # Starts the ranks; each of them imports this file and calls main().
    sys.exit(run_command("examples.pipeline.follow", parse_options, check))

# What follows runs on every rank; it is what a training script of your own needs, except for what slows a rank.

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import colossal_hetero.accelerator  # noqa: F401  (before colossalai: lets it work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.cli.probe_ranks import probe_ranks
from colossal_hetero.profiling.layer_profiler import profile_layers
from examples.common.terminal import compact_table
from examples.common.vit import build_vit, loss_of

MICRO_BATCHES = 8


class SlowDevice:
    """Makes blocks take ``factor`` times as long, as a device would that is shared or throttled."""

    factor = 1.0

    def slow(self, blocks: nn.Module) -> None:
        """Called before ``booster.boost``: hooks from then move with the layers."""
        for block in blocks:
            block.register_forward_pre_hook(self._begin)
            block.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: object) -> None:
        if self.factor > 1 and torch.is_grad_enabled():
            # A backward pass takes twice as long as a forward pass.
            time.sleep(3 * (self.factor - 1) * (time.perf_counter() - self._start))


def main(options: Options) -> None:
    colossalai.launch_from_torch(seed=0, verbose=False)
    ranks, rank, device = dist.get_world_size(), dist.get_rank(), get_accelerator().get_current_device()
    batch = [
        torch.randn(MICRO_BATCHES * options.micro_batch, 3, 32, 32, device=device),
        torch.arange(MICRO_BATCHES * options.micro_batch, device=device) % 10,
    ]
    slow, device_of_rank = slowdowns(options.straggler, ranks), SlowDevice()
    model = build_vit(10, hidden=options.hidden, depth=options.depth, heads=4, patch=4)
    micro_batch = tuple(part[: options.micro_batch] for part in batch)
    profile = profile_layers(model.to(device), micro_batch, cross_entropy, micro_batches=[options.micro_batch]).profile
    device_of_rank.slow(model.blocks)

    planning = PlanConfig(
        cluster=probe_ranks(device)[0],
        profile=profile,
        global_batch_size=len(batch[0]),
        follow_speed=not options.fixed,
    )
    plugin = HeteroHybridParallelPlugin(plan="auto", planning=planning, pp_size=ranks, precision="fp32")
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer, loss_of)

    seconds: list[float] = []
    phases = [0, options.iterations // 3, 2 * options.iterations // 3, options.iterations]
    for iteration in range(options.iterations):
        device_of_rank.factor = slow.get(rank, 1.0) if phases[1] <= iteration < phases[2] else 1.0
        start = time.perf_counter()
        booster.execute_pipeline(iter([batch]), model, loss_of, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        show(seconds, phases, options)
    dist.barrier()
    dist.destroy_process_group()


def show(seconds: list[float], phases: list[int], options: Options) -> None:
    from rich.console import Console

    table = compact_table("Iterations (in ms)", "phase", "first six", "last six")
    for name, first, last in zip(
        ("as planned", f"rank {options.straggler}", "as planned"), phases, phases[1:], strict=False
    ):
        means = (f"{1e3 * median(part):.0f}" for part in (seconds[first : first + 6], seconds[last - 6 : last]))
        table.add_row(name, *means)
    Console().print(table)
    if options.plot is None:
        return
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 3))
    axis.plot([1e3 * each for each in seconds], linewidth=1)
    axis.axvspan(phases[1], phases[2], color="0.9", label=f"rank:factor {options.straggler}")
    axis.set(xlabel="iteration", ylabel="ms", ylim=(0, None))
    axis.legend()
    figure.savefig(options.plot, bbox_inches="tight")
