"""Corrections of errors in Colossal-AI 0.5.0 that occur on every device.

:mod:`colossal_hetero.accelerator` applies them on import, so they also hold for Colossal-AI's own plugins in a process
that uses this package. ``docs/colossalai-corrections.md`` describes each error and its correction for Colossal-AI's
authors. What only a CPU needs is in :mod:`colossal_hetero.cpu`.
"""

from __future__ import annotations

from functools import cache

from . import empty_groups, gradient_norm, layout_cache, padded_vocabulary, second_derivatives

__all__ = ["correct_colossalai"]


@cache
def correct_colossalai() -> None:
    """Apply every correction, once per process."""
    padded_vocabulary.correct()
    gradient_norm.correct()
    layout_cache.correct()
    second_derivatives.correct()
    empty_groups.correct()
