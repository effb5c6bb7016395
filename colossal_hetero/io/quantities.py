"""Numbers in files: with generous limits, so that what is computed from them cannot overflow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

__all__ = [
    *("Amount", "ByteCount", "BytesPerSecond", "Factor", "Flops", "NonNegative", "PositiveCount"),
    *("PositiveSeconds", "Seconds"),
]

MAX_SECONDS = 1e15
"""About 30 million years."""
MAX_BYTES = 10**18
MAX_COUNT = 10**9

Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
ByteCount = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Amount = Annotated[float, Field(ge=0, le=MAX_BYTES)]
"""A predicted number of bytes."""
BytesPerSecond = Annotated[float, Field(ge=1e-6, le=1e30)]
Flops = Annotated[float, Field(ge=1, le=1e30)]
"""FLOP/s."""
Factor = Annotated[float, Field(ge=1e-9, le=1e12)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
