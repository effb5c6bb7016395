"""Common parts of the benchmarks: options, starting ranks, a model to train, timing in alternating blocks, and tables.

Every benchmark is one command, ``python -m benchmarks.FOLDER.NAME``. It starts its own ranks with one thread each.
Variants are timed in alternating blocks in the same processes, so that other work on the machine slows all of them
equally.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text
from timm.models.vision_transformer import VisionTransformer

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI for a CPU)

# isort: split
import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin

from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin
from colossal_hetero.layers import TimmViTPolicy
from colossal_hetero.testing.stragglers import Stragglers, cpu_quota, inject_stragglers

Key = TypeVar("Key")
BATCH = 32
MODEL = {"embed_dim": 512, "depth": 2, "num_heads": 8, "patch_size": 4, "img_size": 32, "num_classes": 10}


def read_options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The options of a command: ``--NAME`` for each keyword, of the type of its default.

    A tuple takes one or several values, of texts only those that it has; a type has no default.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, tuple):
            kind, shown = type(default[0]), " ".join(map(str, default))
            choices = default if kind is str else None
            parser.add_argument(flag, type=kind, nargs="+", default=default, choices=choices, help=f"[{shown}]")
        else:
            parser.add_argument(flag, type=type(default), default=default, help="[%(default)s]")
    return parser.parse_args()


def start_ranks(count: int) -> None:
    """Run this script as ``count`` ranks. The first process restarts it under torchrun; ranks connect and return.

    If there are enough cores, each rank stays on one of its own, so that ranks do not disturb each other.
    """
    if "RANK" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        # Use huge pages for large tensors; otherwise page faults take a large part of the time of small products.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        os.execv(sys.executable, [*launcher, "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if count <= len(cores):
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"])]})
    colossalai.launch_from_torch(seed=1, verbose=False)


def quota_on(rank: int, share: float, period_us: int = 100_000) -> AbstractContextManager[None]:
    """In the block, this rank runs under a CPU quota of so much of a core, unless the quota is 1 or of another rank.

    Needs Linux, and write access to cgroups (version 1 or 2). The program does not know the quota.
    """
    return cpu_quota(share, period_us) if dist.get_rank() == rank and share < 1 else nullcontext()


def slowest(seconds: float) -> float:
    """The longest time of all ranks."""
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.item()


def make_vit(hidden: int, depth: int, patch: int = 4) -> VisionTransformer:
    """A small ViT for images of 32 × 32 pixels, with the same weights on every call."""
    torch.manual_seed(1)
    sizes = dict(img_size=32, patch_size=patch, embed_dim=hidden, depth=depth, num_heads=4, num_classes=10)
    return VisionTransformer(**sizes, class_token=False, global_pool="avg")


def describe_machine() -> str:
    """The processor, its cores, and the versions of the software, in one line."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            processor = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return (
        f"{processor}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"Colossal-AI {colossalai.__version__}, timm {timm.__version__}; "
        f"one thread per rank, huge pages {'on' if os.environ.get('THP_MEM_ALLOC_ENABLE') == '1' else 'off'}"
    )


class Timed:
    """What takes turns: its times are collected in ``seconds``."""

    seconds: list[float]

    def iterate(self) -> float:
        """Train one iteration. Returns its seconds."""
        raise NotImplementedError

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


@dataclass
class Variant(Timed):
    """One of several models in training that take turns."""

    name: str
    balance: BalanceConfig | None = None
    """Settings of our plugin; None: use Colossal-AI's own plugin."""
    stragglers: Stragglers | None = None
    learning_rate: float = 1e-3
    micro_batches: int = 1
    """Passes in each iteration, of a part of the batch each."""
    seconds: list[float] = field(default_factory=list)

    def build(self) -> None:
        """Make and boost the model. All variants start from the same weights."""
        torch.manual_seed(1)
        model = self.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        arguments: dict[str, Any] = {"tp_size": dist.get_world_size(), "pp_size": 1, "precision": "fp32"}
        if self.balance is None:
            policy = {"custom_policy": TimmViTPolicy()} if isinstance(model, VisionTransformer) else {}
            self.plugin = HybridParallelPlugin(**policy, **arguments)
        else:
            self.plugin = HeteroHybridParallelPlugin(balance=self.balance, **arguments)
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        if self.stragglers is not None:
            inject_stragglers(self.model, self.optimizer, self.stragglers)
        generator = torch.Generator().manual_seed(2)
        self.images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        self.labels = torch.randint(0, 10, (BATCH,), generator=generator)

    def make_model(self) -> torch.nn.Module:
        return VisionTransformer(**MODEL)

    def loss(self) -> torch.Tensor:
        """The loss of the next batch."""
        return F.cross_entropy(self.model(self.images), self.labels)

    def iterate(self) -> float:
        start = time.perf_counter()
        if self.micro_batches == 1:
            self.booster.backward(self.loss(), self.optimizer)
        else:
            for images, labels in zip(
                self.images.chunk(self.micro_batches), self.labels.chunk(self.micro_batches), strict=True
            ):
                self.booster.backward(F.cross_entropy(self.model(images), labels), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def take_turns(variants: Sequence[Timed], warmup: int, rounds: int, block: int) -> None:
    """Train ``warmup`` iterations of each variant; then time ``rounds`` blocks of ``block`` iterations of each in turn.

    Before each block, one more iteration fills the caches and is not timed.
    """
    for variant in variants:
        for _ in range(warmup):
            variant.iterate()
    for _ in range(rounds):
        for variant in variants:
            dist.barrier()
            variant.iterate()
            variant.seconds.extend(variant.iterate() for _ in range(block))


def medians_in_turns(functions: Mapping[Key, Callable[[], float]], rounds: int, warmup: int = 0) -> dict[Key, float]:
    """Median of what each function returns, a time, in so many rounds after ``warmup`` more."""
    found: dict[Key, list[float]] = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name, function in functions.items():
            seconds = function()
            if number >= warmup:
                found[name].append(seconds)
    return {name: median(each) for name, each in found.items()}


def steady_seconds(iterate: Callable[[], object], iterations: int) -> float:
    """Of one of so many iterations on the slowest rank, after one that is not timed."""
    dist.barrier()
    iterate()
    begin = time.perf_counter()
    for _ in range(iterations):
        iterate()
    return slowest((time.perf_counter() - begin) / iterations)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()) -> None:
    """Print a table on rank 0, in Markdown, so that it can be pasted into the README of the folder."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    console = Console(width=200, highlight=False)
    console.print(f"{title}\n")
    table = Table(box=MARKDOWN)
    for column in columns:
        # In a plain string rich would read a unit in brackets as markup.
        table.add_column(Text(column))
    for row in rows:
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    for note in [*notes, describe_machine()]:
        console.print(note)


def print_markdown(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table too wide for a terminal. Sources of peers are left out of names, and stages are divided by commas."""
    print(f"\n{title}\n")
    for row in (names, ["---"] * len(names), *rows):
        print(f"| {' | '.join(each.split(' (eth-easl')[0].replace(' | ', ', ') for each in row)} |")
