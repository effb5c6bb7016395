"""Patches that let Colossal-AI's hybrid-parallel plugin run on a CPU over Gloo.

:mod:`colossal_hetero.accelerator` calls :func:`patch_colossalai` on import if there is no GPU or NPU,
and never otherwise. Each patch replaces one name and says why; none changes what a GPU does.
"""

from __future__ import annotations

from functools import cache

from . import collectives, layers, models, point_to_point, zero

__all__ = ["patch_colossalai"]


@cache
def patch_colossalai() -> None:
    """Apply every patch, once per process."""
    point_to_point.patch()
    collectives.patch()
    layers.patch()
    models.patch()
    zero.patch()
