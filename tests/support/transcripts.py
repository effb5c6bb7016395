"""Text files of commands and what each must say: a line ``$ command``, and below it parts of the message in order."""

import re
from pathlib import Path


def read_cases(file: Path) -> list[tuple[str, str]]:
    """``(command, what it says)`` of each command in a file."""
    parts = re.split(r"^\$ ?", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [(command, says) for command, _, says in (part.rstrip().partition("\n") for part in parts[1:])]


def missing_part(says: str, message: str) -> str | None:
    """The first part of ``says`` that the message lacks after the parts before it; `` … `` and lines end a part."""
    words = " ".join(message.split())
    for part in re.split(r" … |\n", says):
        before, found, words = words.partition(part)
        if not found:
            return f"{part!r} is not in {before!r}"
    return None
