"""What has happened when a world changed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Recovery"]


@dataclass(frozen=True)
class Recovery:
    """A change of the world."""

    version: int
    """Optimizer steps that were done."""
    before: int
    """Members."""
    after: int
    seconds: float
    received_bytes: int
    """By this rank."""
    iterations_repeated: int
    """1 if the passes since the last step are run once more, else 0."""
    reason: str

    def in_words(self) -> str:
        """For the terminal, of rank 0, and for the log, of every rank."""
        lost = f"iteration {self.version + 1} is done again" if self.iterations_repeated else "nothing is lost"
        return (
            f"{self.before} members became {self.after} after step {self.version}: {self.reason}; {lost}; "
            f"{self.seconds:.1f} s, {self.received_bytes / 1e6:.1f} MB received by this rank"
        )
