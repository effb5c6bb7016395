"""The measured link between two ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ...io.schema import FilePart

__all__ = ["MeasuredLink"]


class MeasuredLink(FilePart):
    """Time of a message between two ranks: ``latency_seconds + bytes / bytes_per_second``."""

    ranks: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    """The two ranks, in any order."""
    protocol: Annotated[str, Field(min_length=1)]
    """E.g. the backend that was measured."""
    latency_seconds: Annotated[float, Field(ge=0)]
    bytes_per_second: Annotated[float, Field(gt=0)]

    @field_validator("ranks")
    @classmethod
    def _two_ranks(cls, ranks: tuple[int, int]) -> tuple[int, int]:
        if ranks[0] == ranks[1]:
            raise ValueError(f"a link joins two ranks, not rank {ranks[0]} with itself")
        return ranks
