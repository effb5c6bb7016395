"""Training iterations on a GPU: where the host waits for the device, and what mode "off" costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from colossal_hetero import Pruning
from colossal_hetero.planner.profile.estimate import VitSizes

from ..part import Case, Machine, Part, Row
from ..ranks import run_ranks
from ..training.cost_of_off import off_rows
from ..training.iterations_with_waits import CountedIterations, waits_by_rule, waits_of_plugins
from ..training.vit_shard import TINY, VitShard

__all__ = ["PART"]

ABOUT = """
*Hidden waits.* Training iterations of four blocks of ViT-1B under `torch.cuda.set_sync_debug_mode("warn")`, which
reports operations and copies that make the host wait for the GPU; the aim is none. Two ranks form a tensor-parallel
group. A slow rank repeats its products four times; after every six iterations the other one is slow, so that the
balancer judges, changes its plan, and reads its clocks. The first iteration, which sets up memory and connections, is
left out. Ranks that share one GPU send messages through the host; the waits of the transport for that are listed in the
note and do not count. *In one process*, the layers of four ranks run in turn, and one rank prunes columns with changing
ratios; nothing is sent. Colossal-AI's own plugin is the control.

*Off.* One shard of 8 of ViT-1B in bf16 with SGD, on a rank that is alone: Colossal-AI's layers, a second such model as
the control, and this package's layers with a balancer in mode "off". They take turns; the median time of an iteration
is given relative to the first one's; the aim is 1.01. *Marks*: what the marks of the clock take the host for one layer
in an iteration that is measured. In mode "off" a few iterations are.
"""

COLUMNS: dict[str, Any] = {"mode": "resize", "pruning": Pruning(resizing="column")}
CONFIGS: Mapping[str, Mapping[str, dict[str, Any] | None]] = {
    "nothing changed": {"Colossal-AI's plugin": None, "off": {"mode": "off"}},
    "resizing": {
        "units": {"mode": "resize"},
        "units by priority": {"mode": "resize", "pruning": Pruning(priority="priority")},
        "columns": COLUMNS,
        "columns by priority-diff": COLUMNS | {"pruning": Pruning(resizing="column", priority="priority-diff")},
    },
    "migrating": {
        "migrate units": {"mode": "migrate"},
        "migrate columns": {"mode": "migrate", "migration": "broadcast-reduce"},
        "auto": {"mode": "auto"},
    },
    "both": {
        "semi": {"mode": "semi"},
        "semi, columns": {"mode": "semi", "migration": "scatter-gather"},
        "auto, prunes up to 0.3": {"mode": "auto", "max_resize": 0.3},
    },
}

TINY_CONFIGS: Mapping[str, Mapping[str, dict[str, Any] | None]] = {
    "some modes": {
        "Colossal-AI's plugin": None,
        "columns by priority-diff": COLUMNS | {"pruning": Pruning(resizing="column", priority="priority-diff")},
        "semi": {"mode": "semi"},
    }
}

FOUR_BLOCKS = VitSizes(hidden=2048, depth=4, heads=32, patch=4)


def cases(machine: Machine) -> Sequence[Case]:
    found = [
        Case(f"hidden waits, {name}", partial(_waits_of_plugins, machine, configs), memory_bytes=16 << 30)
        for name, configs in (TINY_CONFIGS if machine.is_tiny else CONFIGS).items()
    ]
    found.append(Case("hidden waits, in one process", partial(_waits_by_rule, machine), memory_bytes=8 << 30))
    found.append(Case("off", partial(_cost_of_off, machine), memory_bytes=24 << 30))
    return found


def _waits_of_plugins(machine: Machine, configs: Mapping[str, dict[str, Any] | None]) -> list[Row]:
    shard = VitShard(TINY if machine.is_tiny else FOUR_BLOCKS, 1)
    sizes = (4, "fp32", 6, 3) if machine.is_tiny else (32, "bf16", 24, 6)
    ranks = run_ranks(machine, 2, waits_of_plugins, configs, shard, *sizes)
    # Only ranks that share a GPU, or the CPU, send messages through the host.
    through_host = machine.gpus < 2
    return [_row(name, [found[name] for found in ranks], through_host) for name in configs]


def _waits_by_rule(machine: Machine) -> list[Row]:
    shard = VitShard(TINY if machine.is_tiny else FOUR_BLOCKS, 1)
    sizes = (4, torch.float32, 7) if machine.is_tiny else (64, torch.bfloat16, 36)
    found = waits_by_rule(machine.device, shard, *sizes)
    return [_row(f"columns by {rule}", [counted], False) for rule, counted in found.items()]


def _row(name: str, ranks: Sequence[CountedIterations], through_host: bool) -> Row:
    """The largest number of hidden waits of a rank, and what else happened."""
    hidden = [found.places(is_transport=False) for found in ranks]
    sending = [found.places(is_transport=True) for found in ranks]
    if not through_host:
        hidden = [one + other for one, other in zip(hidden, sending, strict=True)]
    first = ranks[0]
    words = [f"{first.iterations} iterations", f"{first.changes} changes of plan", f"{first.measured} measured"]
    if through_host:
        words.append(f"{max(map(Counter.total, sending))} waits of the transport")
    words += _places(hidden)
    return name, max(map(Counter.total, hidden)), 0, "; ".join(words)


def _places(counts: Iterable[Counter[str]]) -> list[str]:
    most = sum(counts, Counter[str]()).most_common(5)
    return [f"{place} × {count}" for place, count in most]


def _cost_of_off(machine: Machine) -> list[Row]:
    shard = VitShard.of("vit-1b", 8, machine.is_tiny)
    images, rounds = (2, 1) if machine.is_tiny else (64, 30)
    return run_ranks(machine, 1, off_rows, shard, images, rounds)[0]


PART = Part("sync", ABOUT, ("case", "what", "measured", "aim ≤", "note"), cases)
