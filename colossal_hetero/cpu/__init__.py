"""What keeps Colossal-AI's hybrid-parallel plugin from running on a CPU over Gloo, mended.

:mod:`colossal_hetero.accelerator` calls :func:`patch_colossalai` on import where the CPU is what there is to train on,
and never elsewhere. Each mend replaces one name and says why; none changes what a GPU does.
"""

from __future__ import annotations

from functools import cache

from . import collectives, layers, models, point_to_point, zero

__all__ = ["patch_colossalai"]


@cache
def patch_colossalai() -> None:
    """Apply every mend, once per process."""
    point_to_point.patch()
    collectives.patch()
    layers.patch()
    models.patch()
    zero.patch()
