"""Plans as Sailor's repository writes them, said as layout lines of ``colossal-hetero evaluate``.

Such a plan is a list of pipelines. Each has ``layers_per_stage`` (numbers of layers, where layer 0 is the embedding and
the last one the head) and for each stage its data-parallel members (``tmp_stages``): a list of ``(kind, GPUs of the
node, zone)`` with more than one entry if a tensor-parallel group has several nodes or kinds, and the degree. ``mbs`` is
the number of samples in a micro-batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["SEVERAL_DEGREES", "has_one_degree", "layout_line"]

SEVERAL_DEGREES = "not priced: several tensor-parallel degrees"
"""Why our model has no price of some plans of peers."""


class Stage(NamedTuple):
    """A stage of one of our pipelines."""

    kind: str
    degree: int
    layers: tuple[int, ...]


def layout_line(plan: Mapping[str, Any], layers: int, before: int, after: int, global_batch: int) -> str:
    """The plan as a layout line.

    If the micro-batches cannot be divided equally, the first pipelines run one more.

    Args:
        plan: With ``mbs`` and ``pipelines``.
        layers: Of the model, with embedding and head.
        before: Layers before the blocks.
        after: Layers after the blocks.
        global_batch: Samples per iteration.

    Raises:
        ValueError: The plan cannot be said as a line; the message says why.
    """
    pipelines: list[tuple[Stage, ...]] = []
    for each in plan["pipelines"]:
        stages = [[_member(*member) for member in members] for members in each["tmp_stages"]]
        if len(set(map(len, stages))) > 1:
            raise ValueError("its stages have different numbers of data-parallel members")
        ranges = _checked_layers(each["layers_per_stage"], layers, before, after)
        pipelines += [
            tuple(Stage(*member, part) for member, part in zip(members, ranges, strict=True))
            for members in zip(*stages, strict=True)
        ]
    size = float(plan["mbs"])
    if not size.is_integer():
        raise ValueError(f"its micro-batches have {size:g} samples")
    if global_batch % size:
        raise ValueError(f"{global_batch} samples are no whole number of micro-batches of {size:g}")
    total = global_batch // int(size)
    if total < len(pipelines):
        raise ValueError(f"it has {len(pipelines)} pipelines for {total} micro-batches")
    counts = [total // len(pipelines) + (number < total % len(pipelines)) for number in range(len(pipelines))]
    degree, *others = {stage.degree for each in pipelines for stage in each}
    texts = [_pipeline(each, before, layers - before - after, not others) for each in pipelines]
    groups = Counter(zip(texts, counts, strict=True))
    steps = set(counts)
    parts = " + ".join(
        f"{number} × {text}" + (f" × {count}" if len(steps) > 1 else "") for (text, count), number in groups.items()
    )
    dp = f"dp {len(pipelines)} × {next(iter(groups))[0]}" if len(groups) == 1 else f"dp {len(pipelines)} = {parts}"
    tp = "" if others or degree == 1 else f"tp {degree} · "
    return f"{tp}{dp} · micro-batch {size:g}" + (f" × {counts[0]}" if len(steps) == 1 else "")


def _member(nodes: Sequence[Sequence[Any]], degree: int) -> tuple[str, int]:
    """Kind of GPU and degree of a tensor-parallel group."""
    kinds = {kind for kind, *_ in nodes}
    if len(kinds) > 1:
        raise ValueError(f"a tensor-parallel group has several kinds of GPU: {', '.join(sorted(kinds))}")
    if degree > nodes[0][1]:
        raise ValueError(f"a tensor-parallel group of {degree} GPUs reaches beyond a node")
    return kinds.pop(), degree


def _checked_layers(stages: Iterable[Sequence[int]], layers: int, before: int, after: int) -> list[tuple[int, ...]]:
    """Layers of each stage, which hold all layers in their order; each stage has a block."""
    found = [tuple(int(layer) for layer in each) for each in stages]
    if [layer for each in found for layer in each] != list(range(layers)):
        raise ValueError(f"its stages do not hold the layers 0 to {layers - 1} in their order")
    for each in found:
        if each[-1] < before or each[0] >= layers - after:
            raise ValueError("a stage has no block: embedding and head go with a block in a layout line")
    return found


def has_one_degree(line: str) -> bool:
    """True if all stages of a layout line have one tensor-parallel degree: their own, else that of the line, else 1."""
    whole = re.search(r"\btp (\d+)", re.sub(r"\[[^]]*\]", "", line))
    stages = [stage for pipeline in re.findall(r"\[([^]]*)\]", line) for stage in pipeline.split("|")]
    return len({(own or whole or ["", "1"])[1] for own in (re.search(r"\btp (\d+)", stage) for stage in stages)}) == 1


def _pipeline(stages: Sequence[Stage], before: int, blocks: int, same: bool) -> str:
    parts = []
    for stage in stages:
        form = "" if same else f" (tp {stage.degree})"
        first, last = max(stage.layers[0] - before, 0), min(stage.layers[-1] - before, blocks - 1)
        parts.append(f"{stage.kind}{form} {first}-{last}")
    return f"pp [{' | '.join(parts)}]"
