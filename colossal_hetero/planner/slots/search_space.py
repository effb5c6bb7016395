"""Which forms stages may have in a search: three spaces, each of which contains the one before."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "SIMPLE", "WHOLE", "SearchSpace"]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a search may choose for each stage, beside its devices and its blocks.

    Plans that use ``mixed_degrees`` cannot be run yet; see
    :func:`~colossal_hetero.planner.plans.runnable.why_not_runnable`.

    Raises:
        ValueError: There is no ZeRO stage, or one is not 0 or 1.
    """

    mixed_degrees: bool = False
    """Stages may have different tensor-parallel degrees: in large clusters, one for each kind of device."""
    recompute: bool = False
    """Stages that do not fit into memory otherwise recompute."""
    zero_stages: tuple[int, ...] = (0,)
    """ZeRO stages to try, 0 and 1."""

    def __post_init__(self) -> None:
        for stage in self.zero_stages:
            if stage not in (0, 1):
                raise ValueError(f"zero_stage={stage} cannot be planned; use 0, 1 or both")
        if not self.zero_stages:
            raise ValueError("there is no ZeRO stage to try; give at least one, such as 0")


SIMPLE = SearchSpace()
"""Stages of one form, in ZeRO stage 0, without recomputation."""
DEFAULT = SearchSpace(recompute=True, zero_stages=(0, 1))
"""Stages of one form: the plugin runs all of these plans, and good lower bounds are known."""
WHOLE = SearchSpace(mixed_degrees=True, recompute=True, zero_stages=(0, 1))
"""Everything that plans can say."""
