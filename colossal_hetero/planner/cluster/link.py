"""A link between two ranks, as measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ...io.schema import FilePart

__all__ = ["Link"]


class Link(FilePart):
    """What it costs two ranks to send each other a message: ``latency + bytes / bytes_per_second``."""

    ranks: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    protocol: Annotated[str, Field(min_length=1)]
    latency_seconds: Annotated[float, Field(ge=0)]
    bytes_per_second: Annotated[float, Field(gt=0)]

    @field_validator("ranks")
    @classmethod
    def _two_ranks(cls, ranks: tuple[int, int]) -> tuple[int, int]:
        if ranks[0] == ranks[1]:
            raise ValueError(f"a link joins two ranks, not rank {ranks[0]} with itself")
        return ranks
