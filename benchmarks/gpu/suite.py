"""All parts, in the order in which they are run. A part's module is imported only when the part is needed."""

from __future__ import annotations

import importlib

from .part import Part

__all__ = ["PARTS", "load_part"]

PARTS: tuple[str, ...] = ("layers", "sync", "idle", "group", "nccl", "memory", "keeper", "models", "mixed", "profile")
"""Names of the parts; each is the variable ``PART`` of the module of that name in ``benchmarks/gpu/parts``."""


def load_part(name: str) -> Part:
    """The part with that name."""
    part: Part = importlib.import_module(f"benchmarks.gpu.parts.{name}").PART
    return part
