"""Which forms stages may have in a search: four spaces, each of which contains the one before."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "RUNNABLE", "SIMPLE", "WHOLE", "SearchSpace"]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a search may choose for each stage, beside its devices and its blocks.

    Plans that use ``mixed_degrees`` cannot be run yet; see
    :func:`~colossal_hetero.planner.plans.runnable.why_not_runnable`.

    Raises:
        ValueError: There is no width or no ZeRO stage, a width is below 1, or a ZeRO stage is not 0 or 1.
    """

    mixed_degrees: bool = False
    """Stages may have different tensor-parallel degrees: in large clusters, one for each kind of device."""
    widths: tuple[int, ...] = (1,)
    """How many tensor-parallel groups of a stage may divide the samples of a micro-batch."""
    recompute: bool = False
    """Stages that do not fit into memory otherwise recompute."""
    zero_stages: tuple[int, ...] = (0,)
    """ZeRO stages to try, 0 and 1."""

    def __post_init__(self) -> None:
        for width in self.widths:
            if width < 1:
                raise ValueError(f"width={width}: a stage has at least 1 group; give widths such as 1, 2, 4")
        for stage in self.zero_stages:
            if stage not in (0, 1):
                raise ValueError(f"zero_stage={stage} cannot be planned; use 0, 1 or both")
        if not self.widths or not self.zero_stages:
            raise ValueError("there is no width or no ZeRO stage to try; give at least one of each, such as 1 and 0")

    @property
    def has_other_forms(self) -> bool:
        """Whether stages may differ in their degrees, or consist of several groups."""
        return self.mixed_degrees or self.widths != (1,)


SIMPLE = SearchSpace()
"""Stages of one form, in ZeRO stage 0, without recomputation."""
DEFAULT = SearchSpace(recompute=True, zero_stages=(0, 1))
"""Stages of one form: the plugin runs all of these plans, and good lower bounds are known."""
RUNNABLE = SearchSpace(widths=(1, 2, 4, 8), recompute=True, zero_stages=(0, 1))
"""Everything that the plugin runs, also stages of several groups."""
WHOLE = SearchSpace(mixed_degrees=True, widths=(1, 2, 4, 8), recompute=True, zero_stages=(0, 1))
"""Everything that plans can say."""
