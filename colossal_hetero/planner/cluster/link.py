"""The measured speed of the connection between two ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ...io.quantities import BytesPerSecond, NonNegative, Seconds
from ...io.schema import FilePart

__all__ = ["MeasuredLink"]


class MeasuredLink(FilePart):
    """How long a message between two ranks takes in one protocol: ``latency_seconds + bytes / bytes_per_second``.

    It holds for both directions, unless the opposite direction has a link of its own.
    """

    ranks: tuple[NonNegative, NonNegative]
    """The sending and the receiving rank."""
    protocol: Annotated[str, Field(min_length=1)]
    """"gloo" or "nccl"."""
    latency_seconds: Seconds
    bytes_per_second: BytesPerSecond

    @field_validator("ranks")
    @classmethod
    def _two_ranks(cls, ranks: tuple[int, int]) -> tuple[int, int]:
        if ranks[0] == ranks[1]:
            raise ValueError(f"a link joins two different ranks, but both are rank {ranks[0]}")
        return ranks
