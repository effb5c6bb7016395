"""A plan's layout on one line of text: pipelines, their stages, kinds of devices and blocks, but not which devices."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from ...common.text import MarkedError, count
from .pass_order import SCHEDULES, Schedule
from .plan import Plan


@dataclass(frozen=True)
class StageLayout:
    """Blocks on the devices, all of one kind, of a tensor-parallel group."""

    device: str
    block_ranges: tuple[tuple[int, int], ...]  # ``[a, b)`` of each chunk, in the order of the model; at least one
    recompute: bool = False
    place: int = field(default=0, compare=False)  # its start in the line that was read


@dataclass(frozen=True)
class PipelineLayout:
    stages: tuple[StageLayout, ...]
    micro_batches: int | None = None  # per iteration; None if the layout does not say it


@dataclass(frozen=True)
class PlanLayout:
    """The pipelines of a plan, one per replica, and its micro-batches."""

    pipelines: tuple[PipelineLayout, ...]
    micro_batch: int | None = None  # samples per micro-batch; None if the layout does not say it
    schedule: Schedule = "1f1b"
    zero_stage: Literal[0, 1] = 0
    tensor_parallel: int = 1
    line: str = field(default="", compare=False)

    @property
    def blocks(self) -> int:
        return max(stop for stage in self.pipelines[0].stages for _, stop in stage.block_ranges)

    @property
    def alike(self) -> bool:
        """True if all pipelines have the same blocks in their stages and equally many micro-batches."""
        shapes = {(each.micro_batches, tuple(stage.block_ranges for stage in each.stages)) for each in self.pipelines}
        return len(shapes) == 1

    def wrong(self, message: str, stage: StageLayout | None = None) -> NoReturn:
        """Raise an error that says what is wrong with the layout, and where in the line that was read."""
        if self.line and stage is not None:
            raise MarkedError(message, self.line, stage.place)
        raise ValueError(message)


def layout_of(plan: Plan) -> PlanLayout:
    pipelines = tuple(
        PipelineLayout(
            tuple(StageLayout(stage.device, stage.block_ranges, stage.recompute) for stage in replica.stages),
            replica.micro_batches,
        )
        for replica in plan.replicas
    )
    return PlanLayout(pipelines, plan.micro_batch, plan.schedule, plan.zero_stage, plan.tensor_parallel)


# Read layout ---------------------------------------------------------------------------------------------------------
# The grammar is in ``docs/evaluating.md``; an example is ``tp 2 · dp 4 × pp [2 × V100-16 0-9 | A100-40 10-23]``.


TIMES = r"[×xX*]"
RANGE = r"\d+(?:\s*[-–]\s*\d+)?"
STAGE = re.compile(
    rf"(?:(?P<number>\d+)\s*{TIMES}\s*)?(?P<device>\S.*?)"
    r"(?P<recompute>\s+(?:\(\s*recompute\s*\)|recompute))?"
    rf"\s+(?P<ranges>{RANGE}(?:\s*\+\s*{RANGE})*)",
    re.IGNORECASE,
)
"""A part of a pipeline: number of stages, device, ``recompute`` in brackets or without, and ranges of blocks."""
SETTING = re.compile(r"(?<![\w-])(?:tp\s*\d+|recompute)(?![\w-])", re.IGNORECASE)
"""What is no part of a device's name: a degree of tensor parallelism, or a further ``recompute``."""
MAX_STAGES = 65_536  # stages of all pipelines together: as many as a cluster file may have devices


def read_layout(text: str) -> PlanLayout:
    """The layout that a line says, as :func:`write_layout` writes it or a person does: ``x`` or ``*`` may stand for
    ``×``, ``,`` for ``·``, and ``;`` for ``+`` between pipelines. Predicted times at the end, as
    ``colossal-hetero plan`` prints them, are ignored."""
    return _Reader(text).layout()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    def layout(self) -> PlanLayout:
        if long := re.search(r"(?<![\w.])\d{16,}", self.text):
            raise self._wrong("numbers have at most 15 digits", long.start())
        said: dict[str, Any] = {}
        while self._match(r"\s*[·,;]?\s*") and self.place < len(self.text):
            start = self.place
            value: Any
            if found := self._match(r"tp\s*(\d+)"):
                name, value = "tp", self._positive(found)
            elif found := self._match(rf"micro-?batch\s*(\d+)(?:\s*{TIMES}\s*(\d+))?"):
                name, value = "micro-batch", (self._positive(found), self._positive(found, 2) if found[2] else None)
            elif found := self._match(rf"({'|'.join(SCHEDULES)})(?![\w-])"):
                name, value = "the schedule", found[1].lower()
            elif found := self._match(r"zero\s*([01])(?!\d)"):
                name, value = "ZeRO", int(found[1])
            elif found := self._match(rf"dp\s*(\d+)\s*(=|{TIMES})\s*"):
                name, value = "the pipelines", self._replicas(self._positive(found), found[2], start)
            elif self._looks_at(rf"(\d+\s*{TIMES}\s*)?(pp\s*)?\["):
                name, value = "the pipelines", self._sum()
            elif self._match(r"[\d.,]+\s*(s|ms|µs)\s*\([^)]*samples/s\)"):
                continue
            else:
                raise self._unknown(f"tp N, dp N × pp […], micro-batch N × K, ZeRO 1, or {', '.join(SCHEDULES)}")
            if name in said:
                raise self._wrong(f"{name}: given twice", start)
            said[name] = value
        if "the pipelines" not in said:
            raise self._wrong("there are no pipelines; write them like dp 4 × pp [V100-16 0-9 | A100-40 10-23]")
        micro_batch, steps = said.get("micro-batch", (None, None))
        forms = (said.get("the schedule", "1f1b"), said.get("ZeRO", 0), said.get("tp", 1))
        return self._checked(PlanLayout(tuple(said["the pipelines"]), micro_batch, *forms, self.text), steps)

    def _replicas(self, number: int, sign: str, start: int) -> list[PipelineLayout]:
        """The pipelines behind ``dp N ×`` or ``dp N =``."""
        pipelines = self._sum() if sign == "=" else self._repeated(number)
        if sign != "=" and self._looks_at(r"\s*[+;]\s*(\d+\s*[×xX*]|pp|\[)"):
            raise self._wrong(
                f"several different pipelines are written dp N = 2 × pp […] + pp […]; dp {number} × is one"
            )
        if len(pipelines) != number:
            raise self._wrong(f"dp {number}, but there are {count(len(pipelines), 'pipeline')}", start)
        return pipelines

    def _sum(self) -> list[PipelineLayout]:
        """Different pipelines, joined by ``+`` or ``;``."""
        pipelines: list[PipelineLayout] = []
        while not pipelines or self._match(rf"\s*[+;]\s*(?=(\d+\s*{TIMES}\s*)?(pp\s*\[|\[|…))"):
            found = self._match(rf"(\d+)\s*{TIMES}\s*")
            pipelines += self._repeated(self._positive(found) if found else 1)
        return pipelines

    def _repeated(self, number: int) -> list[PipelineLayout]:
        """``pp [ … ] × K``, so many times."""
        if not self._match(r"(?:pp\s*)?\["):
            raise self._unknown("a pipeline like pp [V100-16 0-9 | A100-40 10-23]")
        start, end = self.place, self.text.find("]", self.place)
        if end < 0:
            raise self._wrong("the bracket [ is not closed by ]", start - 1)
        stages: list[StageLayout] = []
        for part in re.finditer(r"[^|]*(?:\||$)", self.text[start:end]):
            if part[0] or not stages:
                stages += self._stages(part[0].rstrip("|"), start + part.start())
        if number * len(stages) > MAX_STAGES:
            raise self._wrong(
                f"{count(number, 'pipeline')} of {count(len(stages), 'stage')} are too many; at most {MAX_STAGES:,} "
                "stages are possible in all",
                start - 1,
            )
        self.place = end + 1
        found = self._match(rf"\s*{TIMES}\s*(\d+)(?!\s*{TIMES})")
        return [PipelineLayout(tuple(stages), self._positive(found) if found else None)] * number

    def _stages(self, part: str, start: int) -> list[StageLayout]:
        """The stages of one part, e.g. of "4 × T4 0-7"."""
        start += len(part) - len(part.lstrip())
        found = STAGE.fullmatch(part.strip())
        if found is None:
            self.place = start
            raise self._unknown("a kind of device and its blocks, like A100-40 0-9 or 2 × V100-16 10-23")
        if odd := SETTING.search(found["device"]):
            if odd[0].lower() != "recompute":
                problem = "all stages have one degree of tensor parallelism; write tp N once, before the pipelines"
            elif found["recompute"]:
                problem = "recompute is given twice"
            else:
                problem = "recompute stands alone behind the device, like V100-16 (recompute) 0-9"
            raise self._wrong(problem, start + found.start("device") + odd.start())
        ranges = []
        for each in re.finditer(r"(\d+)(?:\s*[-–]\s*(\d+))?", found["ranges"]):
            first, last = int(each[1]), int(each[2] or each[1])
            if last < first:
                raise self._wrong(
                    f"blocks {first} to {last} are none; write the first block before the last one",
                    start + found.start("ranges") + each.start(),
                )
            ranges.append((first, last + 1))
        number, blocks = int(found["number"] or 1), sum(stop - start for start, stop in ranges)
        stage = StageLayout(found["device"], tuple(ranges), bool(found["recompute"]), start + found.start("device"))
        if number == 1:
            return [stage]
        if len(ranges) > 1:
            raise self._wrong("stages with several chunks are written one by one", start)
        if number < 1 or blocks % number or number > MAX_STAGES:
            raise self._wrong(
                f"{count(blocks, 'block')} cannot be divided equally over {count(number, 'stage')}; write the stages "
                "one by one, or other numbers",
                start,
            )
        bounds = range(ranges[0][0], ranges[0][1] + 1, blocks // number)
        return [replace(stage, block_ranges=(each,)) for each in itertools.pairwise(bounds)]

    def _checked(self, layout: PlanLayout, steps: int | None) -> PlanLayout:
        """The layout, in which all pipelines hold all blocks."""
        finished: dict[PipelineLayout, PipelineLayout] = {}
        for each in dict.fromkeys(layout.pipelines):
            if steps is not None and each.micro_batches not in (None, steps):
                raise self._wrong(
                    f"a pipeline has {each.micro_batches} micro-batches, but micro-batch {layout.micro_batch} × "
                    f"{steps} says {steps} for all; leave one of both out",
                    each.stages[0].place,
                )
            finished[each] = PipelineLayout(each.stages, each.micro_batches or steps)
        ends = {each: self._end(each.stages) for each in finished}
        for each, end in ends.items():
            if end != max(ends.values()):
                raise self._wrong(
                    f"{_blocks(end, max(ends.values()))} the other pipelines but not in this one; each holds the whole "
                    "model",
                    each.stages[-1].place,
                )
        chunks = len(layout.pipelines[0].stages[0].block_ranges)
        for stage in itertools.chain.from_iterable(each.stages for each in finished):
            if layout.schedule == "1f1b" and len(stage.block_ranges) > 1:
                raise self._wrong(
                    "a stage with several chunks needs a schedule: write · interleaved or · zbv", stage.place
                )
            if layout.schedule != "1f1b" and len(stage.block_ranges) != chunks:
                raise self._wrong("all stages have equally many chunks", stage.place)
        return replace(layout, pipelines=tuple(finished[each] for each in layout.pipelines))

    def _end(self, stages: Sequence[StageLayout]) -> int:
        """The number of blocks that consecutive stages hold."""
        ranges = [(start, stop, stage.place) for stage in stages for start, stop in stage.block_ranges]
        # Stages are in the order of the blocks; only the chunks of stages are not.
        if len(ranges) > len(stages):
            ranges.sort()
        end = 0
        for start, stop, place in ranges:
            if start != end:
                number, (low, high) = ("no stage", (end, start)) if start > end else ("two stages", (start, end))
                raise self._wrong(f"{_blocks(low, high)} {number}; this one must start at {end}", place)
            end = stop
        return end

    def _unknown(self, expected: str) -> MarkedError:
        if self._looks_at(r"\s*…"):
            return self._wrong(
                "… stands for parts that were left out of this line; write all parts, or give the plan's file"
            )
        return self._wrong(f"expected {expected}")

    def _wrong(self, message: str, place: int | None = None) -> MarkedError:
        return MarkedError(message, self.text, min(self.place if place is None else place, len(self.text)))

    def _positive(self, found: re.Match[str], group: int = 1) -> int:
        number = int(found[group])
        if number < 1:
            raise self._wrong("0 is not possible here; numbers start at 1", found.start(group))
        return number

    def _match(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern, re.IGNORECASE).match(self.text, self.place)
        if found:
            self.place = found.end()
        return found

    def _looks_at(self, pattern: str) -> bool:
        return re.compile(pattern, re.IGNORECASE).match(self.text, self.place) is not None


def _blocks(start: int, stop: int) -> str:
    return f"block {start} is in" if stop - start == 1 else f"blocks {start} to {stop - 1} are in"


# Write layout --------------------------------------------------------------------------------------------------------


MAX_PARTS = 8  # parts of a pipeline, or different pipelines, that a shortened line shows at most


def write_layout(layout: PlanLayout, *, shortened: bool = False) -> str:
    """The layout on one line, e.g. ``tp 4 · dp 2 × pp [A100-40 0-15 | V100-16 16-23] · micro-batch 4 × 16``."""
    shapes = Counter((_pipeline(each, shortened), each.micro_batches) for each in layout.pipelines)
    counts = {micro_batches for _, micro_batches in shapes}
    alike = len(counts) == 1
    parts = []
    shown = list(shapes.items())[: MAX_PARTS if shortened else None]
    for (pipeline, micro_batches), number in shown:
        repeated = "" if number == 1 and len(shapes) > 1 else f"{number} × "
        parts.append(f"{repeated}{pipeline}{'' if alike or micro_batches is None else f' × {micro_batches}'}")
    if len(shown) < len(shapes):
        parts.append("…")
    words = [f"tp {layout.tensor_parallel}"]
    words.append(f"dp {parts[0]}" if len(shapes) == 1 else f"dp {len(layout.pipelines)} = {' + '.join(parts)}")
    if layout.micro_batch is not None:
        steps = counts.pop() if alike else None
        words.append(f"micro-batch {layout.micro_batch}{'' if steps is None else f' × {steps}'}")
    if layout.schedule != "1f1b":
        words.append(layout.schedule)
    if layout.zero_stage:
        words.append(f"ZeRO {layout.zero_stage}")
    return " · ".join(words)


def _pipeline(pipeline: PipelineLayout, shortened: bool) -> str:
    """``pp [A100-40 0-15 | V100-16 16-23]``; "4 × T4 0-7" are four stages of two blocks; "+" joins chunks. Stages with
    several chunks share no part, to tell them apart."""
    parts = []
    for (words, *_), run in itertools.groupby(
        enumerate(pipeline.stages),
        key=lambda each: (
            device_in_words(each[1].device, each[1].recompute),
            tuple(stop - start for start, stop in each[1].block_ranges),
            each[0] if len(each[1].block_ranges) > 1 else 0,
        ),
    ):
        stages = [stage.block_ranges for _, stage in run]
        blocks = " + ".join(
            str(start) if stop - start == 1 else f"{start}-{stop - 1}" for start, stop in joined_ranges(stages)
        )
        parts.append(f"{f'{len(stages)} × ' if len(stages) > 1 else ''}{words} {blocks}")
    if shortened and len(parts) > MAX_PARTS:
        parts = [*parts[: MAX_PARTS - 2], "…", parts[-1]]
    return f"pp [{' | '.join(parts)}]"


def device_in_words(device: str, recompute: bool) -> str:
    """The device of a stage, e.g. "V100-16 (recompute)"."""
    return f"{device} (recompute)" if recompute else device


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
