"""An error in one line of text that a person wrote, which points to the column."""

from __future__ import annotations

__all__ = ["MarkedError"]

WIDTH = 110
"""Characters of the line that are shown at most."""


class MarkedError(ValueError):
    """An error at one place of a line of text; as a string, the message names the column.

    Args:
        message: What is wrong, in words.
        line: The whole text.
        place: Index of the character where the error is.
    """

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
