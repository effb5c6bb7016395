"""The pydantic base of everything that the package reads from files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["FilePart"]


class FilePart(BaseModel):
    """A part of a file: immutable, unknown fields are errors, and numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)
