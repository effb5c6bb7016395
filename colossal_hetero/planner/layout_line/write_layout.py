"""Writes a layout on one line; :mod:`.read_layout` reads it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from .plan_layout import PipelineLayout, PlanLayout, StageLayout

__all__ = ["form_in_words", "joined_ranges", "write_layout"]

MAX_PARTS = 8
"""Parts of a pipeline, or different pipelines, that a shortened line shows at most."""


def write_layout(layout: PlanLayout, *, shortened: bool = False) -> str:
    """The layout on one line, e.g. ``tp 4 · dp 2 × pp [A100-40 0-15 | V100-16 16-23] · micro-batch 4 × 16``.

    Each part of a pipeline has the numbers of its first and its last block.

    Args:
        layout: What to write.
        shortened: Whether parts of long lines are left out; the line then cannot be read back.
    """
    degree = layout.tensor_parallel
    shapes = Counter((_pipeline(each, degree, shortened), each.micro_batches) for each in layout.pipelines)
    counts = {micro_batches for _, micro_batches in shapes}
    alike = len(counts) == 1
    parts = []
    shown = list(shapes.items())[: MAX_PARTS if shortened else None]
    for (pipeline, micro_batches), number in shown:
        repeated = "" if number == 1 and len(shapes) > 1 else f"{number} × "
        parts.append(f"{repeated}{pipeline}{'' if alike or micro_batches is None else f' × {micro_batches}'}")
    if len(shown) < len(shapes):
        parts.append("…")
    words = [f"tp {degree}"]
    words.append(f"dp {parts[0]}" if len(shapes) == 1 else f"dp {len(layout.pipelines)} = {' + '.join(parts)}")
    if layout.micro_batch is not None:
        steps = counts.pop() if alike else None
        words.append(f"micro-batch {layout.micro_batch}{'' if steps is None else f' × {steps}'}")
    if layout.schedule != "1f1b":
        words.append(layout.schedule)
    if layout.zero_stage:
        words.append(f"ZeRO {layout.zero_stage}")
    return " · ".join(words)


def _pipeline(pipeline: PipelineLayout, usual_degree: int, shortened: bool) -> str:
    """``pp [A100-40 0-15 | V100-16 16-23]``; "4 × T4 0-7" are four stages of one kind that hold two blocks each.

    The chunks of a stage are joined by "+": ``[A100-40 0-7 + 16-19 | V100-16 8-15 + 20-23]``.
    """
    parts = []
    for words, stages in _runs(pipeline.stages, usual_degree):
        blocks = " + ".join(
            str(start) if stop - start == 1 else f"{start}-{stop - 1}"
            for start, stop in joined_ranges([stage.block_ranges for stage in stages])
        )
        parts.append(f"{f'{len(stages)} × ' if len(stages) > 1 else ''}{words} {blocks}")
    if shortened and len(parts) > MAX_PARTS:
        parts = [*parts[: MAX_PARTS - 2], "…", parts[-1]]
    return f"pp [{' | '.join(parts)}]"


def _runs(stages: Sequence[StageLayout], usual_degree: int) -> list[tuple[str, list[StageLayout]]]:
    """Neighboring stages that share a part, with the words before their blocks.

    Stages with several chunks share none, because their blocks could not be told apart.
    """
    runs = itertools.groupby(
        enumerate(stages),
        key=lambda each: (
            _words(each[1], usual_degree),
            each[1].blocks_per_chunk,
            each[0] if len(each[1].block_ranges) > 1 else 0,
        ),
    )
    return [(words, [stage for _, stage in run]) for (words, _, _), run in runs]


def _words(stage: StageLayout, usual_degree: int) -> str:
    """The device, and what is special about the stage: ``V100-16 (tp 4, recompute)``."""
    degree = None if stage.tensor_parallel == usual_degree else stage.tensor_parallel
    return f"{stage.device}{form_in_words(degree, stage.recompute)}"


def form_in_words(degree: int | None, recompute: bool) -> str:
    """What is special about a stage, e.g. " (tp 4, recompute)"; empty for most stages.

    Args:
        degree: Devices in its tensor-parallel group. None: as many as usual.
        recompute: Whether its backward pass runs the forward pass again.
    """
    parts = [f"tp {degree}"] if degree is not None else []
    parts += ["recompute"] if recompute else []
    return f" ({', '.join(parts)})" if parts else ""


def joined_ranges(stages: Sequence[Sequence[tuple[int, int]]]) -> tuple[tuple[int, int], ...]:
    """``[a, b)`` of each chunk of a stage, or of all blocks of several stages, each run of consecutive blocks once."""
    if len(stages) == 1:
        return tuple(stages[0])
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(itertools.chain.from_iterable(stages)):
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return tuple(joined)
