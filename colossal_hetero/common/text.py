"""Numbers and messages for people: plurals, and one unit and equally many decimals per column."""

import importlib
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .atomic_files import replacing


def count(number: int, noun: str) -> str:
    """A number with its noun, e.g. "1 rank", "1,024 ranks", "2 batches"."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def aligned(values: Sequence[float]) -> list[str]:
    """Numbers with equally many decimals: the largest has four digits, but at most three decimals."""
    largest = max(values, default=0.0)
    decimals = 3 if largest <= 0 else min(max(3 - math.floor(math.log10(largest)), 0), 3)
    return [f"{value:,.{decimals}f}" for value in values]


def times(*columns: Sequence[float]) -> tuple[Any, ...]:
    """The unit that suits the longest of these seconds (s, ms or µs), and each column as text in that unit."""
    longest = max((value for column in columns for value in column), default=0.0)
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if longest * f >= 1.0), (1e6, "µs"))
    largest = [value * factor for column in columns for value in column]
    texts = iter(aligned(largest))
    return (unit, *([next(texts) for _ in column] for column in columns))


def duration(seconds: float) -> str:
    if seconds == 0.0:
        return "0 s"
    unit, (text,) = times([seconds])
    return f"{text} {unit}"


def byte_unit(size: float) -> tuple[float, str]:
    """The unit that suits ``size`` (KiB, MiB or GiB), in bytes, and its name."""
    return next(((u, name) for u, name in ((2.0**30, "GiB"), (2.0**20, "MiB")) if size >= u), (2.0**10, "KiB"))


def spans(ranks: Sequence[int], max_parts: int = 6) -> str:
    """Ascending ranks in short: "0-3, 5". With more than ``max_parts`` ranges, the first ranges and the last rank."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    texts = ["-".join(map(str, part)) for part in parts]
    if len(texts) <= max_parts:
        return ", ".join(texts)
    return f"{', '.join(texts[: max_parts - 2])}, …, {ranks[-1]} ({len(ranks)} ranks)"


def numbers_of(record: Any, before: str = "", without: Sequence[str] = ("rank", "number")) -> dict[str, float]:
    """The fields of a dataclass that are numbers, by name, with ``before`` in front of it."""
    values = ((each.name, getattr(record, each.name)) for each in fields(record) if each.name not in without)
    return {f"{before}{name}": float(value) for name, value in values if type(value) in (int, float)}


WIDTH = 110


class MarkedError(ValueError):
    """An error at one place of a line of text; as a string, the message names the column."""

    def __init__(self, message: str, line: str, place: int) -> None:
        super().__init__(f"column {place + 1}: {message}")
        self.line = line
        self.place = place

    @property
    def pointer(self) -> str:
        """The line, and below it a mark at the place of the error; of a long line the part around it."""
        first = max(0, min(self.place - WIDTH // 2, len(self.line) - WIDTH))
        shown = self.line[first : first + WIDTH].replace("\n", " ").replace("\t", " ")
        return f"  {shown}\n  {' ' * (self.place - first)}^"


def parse_rank_factors(text: str) -> dict[int, float]:
    """Factors by rank: ``"1:4,3:2.5"`` gives ``{1: 4.0, 3: 2.5}``; neither ranks nor factors are checked."""
    factors: dict[int, float] = {}
    for part in text.split(","):
        rank_text, _, factor_text = part.partition(":")
        try:
            rank, factor = int(rank_text), float(factor_text)
        except ValueError:
            raise ValueError(
                f"{part!r} is not RANK:FACTOR; for example, 3:2 means that rank 3 takes twice as long"
            ) from None
        if rank in factors:
            raise ValueError(f"rank {rank} is given twice in {text!r}")
        factors[rank] = factor
    return factors


# matplotlib is an optional dependency (``pip install 'colossal-hetero[plot]'``), imported when something is drawn.

FORMATS = ("png", "pdf", "svg")
BLUE, LIGHT_BLUE, GRAY, ORANGE, RED = "#0072B2", "#8CCBF0", "#D9D9D9", "#E69F00", "#D55E00"
"""Colors after Okabe and Ito, which can be told apart with every kind of color vision."""


def check_matplotlib() -> None:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib, which cannot be imported ({error}); pip install 'colossal-hetero[plot]'"
        ) from None


def check_name(path: Path | str) -> Path:
    path = Path(path)
    if path.suffix[1:].lower() not in FORMATS:
        raise ValueError(f"cannot tell the kind of picture from {path}; end the name in .{', .'.join(FORMATS)}")
    return path


def save_figure(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)


log = logging.getLogger(__name__.partition(".")[0])


class _ErrorOutput(logging.Handler):
    """Prints messages above a progress bar of tqdm, unless the user has configured logging, whose handlers do."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or len(log.handlers) > 1:
            return
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        words = f"{log.name}: {self.format(record)}"
        try:
            if tqdm is None:
                print(words, file=sys.stderr, flush=True)
            else:
                tqdm.write(words, file=sys.stderr)
        except Exception:
            self.handleError(record)


log.addHandler(_ErrorOutput())
if log.level == logging.NOTSET:
    log.setLevel(logging.INFO)  # not less, if the user has chosen a level


def print_words(message: str) -> None:
    """Print a message to the user through logging."""
    log.info("%s", message)


def say(words: str) -> None:
    """Print a message of one of many processes, whose outputs a launcher mixes."""
    print(f"colossal_hetero: {words}", file=sys.stderr, flush=True)
