"""Plans as Sailor's repository writes them, said as layout lines of ``colossal-hetero evaluate``.

Such a plan is a list of pipelines. Each has ``layers_per_stage`` (numbers of layers, where layer 0 is the embedding and
the last one the head) and for each stage its data-parallel members (``tmp_stages``): a list of ``(kind, GPUs of the
node, zone)`` with more than one entry if a tensor-parallel group has several nodes or kinds, and the degree. ``mbs`` is
the number of samples in a micro-batch of the first stage's members.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

__all__ = ["layout_line"]


class Stage(NamedTuple):
    """A stage of one of our pipelines."""

    kind: str
    degree: int
    width: int
    layers: tuple[int, ...]


def layout_line(plan: Mapping[str, Any], layers: int, before: int, after: int, global_batch: int) -> str:
    """The plan as a layout line.

    If stages have different numbers of members, our pipelines are as many as the greatest common divisor of these
    numbers, and a stage's other members are its width. If the micro-batches cannot be divided equally, the first
    pipelines run one more.

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
    sizes = set()
    for each in plan["pipelines"]:
        stages = [[_member(*member) for member in members] for members in each["tmp_stages"]]
        widths = [len(members) for members in stages]
        replicas = gcd(*widths)
        # The groups that divide samples must be alike. Which members are together is not part of the plan then.
        stages = [sorted(members) if len(members) > replicas else members for members in stages]
        sizes.add(plan["mbs"] * widths[0] / replicas)
        ranges = _checked_layers(each["layers_per_stage"], layers, before, after)
        for number in range(replicas):
            pipelines.append(
                tuple(
                    _stage(members[number * width // replicas : (number + 1) * width // replicas], part)
                    for members, width, part in zip(stages, widths, ranges, strict=True)
                )
            )
    if len(sizes) != 1 or not (size := sizes.pop()).is_integer():
        raise ValueError("its pipelines have micro-batches of different numbers of samples")
    for stage in (stage for pipeline in pipelines for stage in pipeline):
        if size % stage.width:
            raise ValueError(
                f"a stage has {stage.width} groups for micro-batches of {size:g} samples, which take turns"
            )
    if global_batch % size:
        raise ValueError(f"{global_batch} samples are no whole number of micro-batches of {size:g}")
    total = global_batch // int(size)
    if total < len(pipelines):
        raise ValueError(f"it has {len(pipelines)} pipelines for {total} micro-batches")
    counts = [total // len(pipelines) + (number < total % len(pipelines)) for number in range(len(pipelines))]
    texts = [_pipeline(each, before, layers - before - after) for each in pipelines]
    groups = Counter(zip(texts, counts, strict=True))
    steps = set(counts)
    parts = " + ".join(
        f"{number} × {text}" + (f" × {count}" if len(steps) > 1 else "") for (text, count), number in groups.items()
    )
    dp = f"dp {len(pipelines)} × {next(iter(groups))[0]}" if len(groups) == 1 else f"dp {len(pipelines)} = {parts}"
    return f"{dp} · micro-batch {size:g}" + (f" × {counts[0]}" if len(steps) == 1 else "")


def _member(nodes: Sequence[Sequence[Any]], degree: int) -> tuple[str, int]:
    """Kind of GPU and degree of a tensor-parallel group."""
    kinds = {kind for kind, *_ in nodes}
    if len(kinds) > 1:
        raise ValueError(f"a tensor-parallel group has several kinds of GPU: {', '.join(sorted(kinds))}")
    if degree > nodes[0][1]:
        raise ValueError(f"a tensor-parallel group of {degree} GPUs reaches beyond a node")
    return kinds.pop(), degree


def _stage(members: Sequence[tuple[str, int]], layers: tuple[int, ...]) -> Stage:
    if len(set(members)) > 1:
        said = ", ".join(f"{kind} (tp {degree})" for kind, degree in sorted(set(members)))
        raise ValueError(f"the groups that divide a stage's samples are not alike: {said}")
    kind, degree = members[0]
    return Stage(kind, degree, len(members), layers)


def _checked_layers(stages: Iterable[Sequence[int]], layers: int, before: int, after: int) -> list[tuple[int, ...]]:
    """Layers of each stage, which hold all layers in their order; each stage has a block."""
    found = [tuple(int(layer) for layer in each) for each in stages]
    if [layer for each in found for layer in each] != list(range(layers)):
        raise ValueError(f"its stages do not hold the layers 0 to {layers - 1} in their order")
    for each in found:
        if each[-1] < before or each[0] >= layers - after:
            raise ValueError("a stage has no block: embedding and head go with a block in a layout line")
    return found


def _pipeline(stages: Sequence[Stage], before: int, blocks: int) -> str:
    parts = []
    for stage in stages:
        forms = [f"tp {stage.degree}"] if stage.degree > 1 else []
        forms += [f"width {stage.width}"] if stage.width > 1 else []
        form = f" ({', '.join(forms)})" if forms else ""
        first, last = max(stage.layers[0] - before, 0), min(stage.layers[-1] - before, blocks - 1)
        parts.append(f"{stage.kind}{form} {first}-{last}")
    return f"pp [{' | '.join(parts)}]"
