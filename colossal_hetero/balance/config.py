"""What a user chooses about balancing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["BalanceConfig", "Migration", "Mode", "Priority", "Reference", "Resizing"]

Mode = Literal["off", "resize", "migrate", "semi", "auto"]
Migration = Literal["block", "broadcast-reduce", "scatter-gather"]
Resizing = Literal["column", "block"]
Priority = Literal["random", "priority", "priority-diff", "norm-product"]
Reference = Literal["minimum", "mean"]
Imputation = Literal["zero", "average", "same"]
RatioForm = Literal["budgeted", "printed"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How the work of a tensor-parallel group is balanced.

    The defaults change nothing, and ``mode="auto"`` loses nothing: balancing that costs accuracy has to be asked for
    with ``mode="resize"``, with ``mode="semi"`` or with a ``max_resize``.
    """

    mode: Mode = "off"
    """``off`` measures only; ``resize`` prunes work of slow ranks (lossy); ``migrate`` gives it to fast ranks, nothing
    is lost; ``semi`` lets the slowest migrate and the others resize, as SEMI's Algorithm 2 says; ``auto`` migrates and,
    where ``max_resize`` allows, prunes such that the predicted iteration time is least."""

    max_resize: float = None  # type: ignore[assignment]
    """γ_max: the largest share of its work that a rank may prune, in [0, 1); 0 means never prune. None, the default,
    becomes 0 in mode ``auto``, which so loses nothing unless asked to, and 0.9 in the others. Mode ``migrate`` never
    prunes."""

    migration: Migration = "block"
    """What is migrated, and how: whole units of a ``block`` of layers, once per iteration, or columns of each product
    by ``broadcast-reduce`` or ``scatter-gather``, as in SEMI."""

    resizing: Resizing = "column"
    """What mode ``resize`` prunes: contraction columns of each product (``column``, as in SEMI) or whole units of a
    ``block``. Modes ``semi`` and ``auto`` prune in the form in which they migrate."""

    grain: int = 64
    """Units that are pruned and migrated together, at the most, ≥ 1: matrix products like round sizes. Layers with few
    units take a smaller grain."""

    measure_costs: bool = True
    """Whether to measure what pruning and migrating cost here, in a few seconds before training. Without, they are
    taken to cost nothing."""

    cost_cache: str | None = None
    """Folder where measured costs are kept for the next run on the same devices; None is
    ``$XDG_CACHE_HOME/colossal_hetero``, or ``~/.cache/colossal_hetero``; "" keeps nothing."""

    reference: Reference = "minimum"
    """The time T_ref that slow ranks are brought down to in mode ``resize`` (Eq. 1): the ``minimum`` over the group, so
    that nobody waits, or the ``mean``, the paper's choice for resizing alone, which prunes less and leaves the slow
    rank slower."""

    resize_ratio: float | Literal["auto"] = "auto"
    """γ of every slow rank in mode ``resize``: ``auto`` by Eq. 1, or a fixed share in [0, 1) (½ in the paper's suffix-E
    variants)."""

    resize_overhead: float = 0.08
    """What taking columns out and imputing them adds to a rank's products, as a share of their full time, in [0, 1).
    With ``resize_ratio="auto"`` mode ``resize`` prunes that much more than Eq. 1 says, so that the rank really arrives
    at T_ref."""

    priority: Priority = "norm-product"
    """Which columns go: ``random``, ``priority`` (least weight variation), ``priority-diff`` (the same with a ratio per
    layer) or ``norm-product`` (least ‖X column‖·‖W column‖)."""

    imputation: Imputation = "zero"
    """What the gradients hold at pruned columns: ``zero``, ``average`` or ``same``."""

    priority_interval: int | None = None
    """Iterations between two updates of the weight variations; None means an epoch, if the data loader given to
    ``booster.boost`` has a length, else 100."""

    ratio_form: RatioForm = "budgeted"
    """How ``priority-diff`` sets its ratios: ``budgeted`` keeps the time that Eq. 1 asks for, ``printed`` is
    Algorithm 1 to the letter."""

    decay: float = 0.8
    """α of ``priority-diff``: a layer's ratio before budgeting is at least α·γ, in [0, 1]."""

    variation_threshold: float = 1e-3
    """θ_iter of ``priority-diff``: a column that changed less than this per iteration is a candidate, ≥ 0."""

    threshold: float = 0.10
    """Times are exchanged when some rank's moved by more than this share; must be positive."""

    margin: float = 0.10
    """A rank is slow when it takes more than (1 + margin)·T_ref; must be positive. A ratio of mode ``resize`` is
    changed only if that changes the rank's time by more than margin·T_ref; the plan of another mode only if that gains
    more than this share of the iteration, or half of it to start with. Noise of about half of it does not move a plan.
    """

    patience: int = 2
    """Consecutive iterations that must agree before a change of speed is believed, ≥ 1; more before a rank is believed
    to be slower that has flickered."""

    warmup_iterations: int = 2
    """First iterations that are not judged (allocation, caches), ≥ 0."""

    seed: int = 0
    """Seed of the ``random`` rule."""

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("migration", self.migration, get_args(Migration))
        _check_choice("resizing", self.resizing, get_args(Resizing))
        _check_choice("reference", self.reference, get_args(Reference))
        _check_choice("priority", self.priority, get_args(Priority))
        _check_choice("imputation", self.imputation, get_args(Imputation))
        _check_choice("ratio_form", self.ratio_form, get_args(RatioForm))
        if self.max_resize is None:
            object.__setattr__(self, "max_resize", 0.0 if self.mode == "auto" else 0.9)
        _check_share("max_resize", self.max_resize)
        if not 0.0 <= self.resize_overhead < 1.0:
            raise ValueError(f"resize_overhead={self.resize_overhead} is outside [0, 1): a share of the products' time")
        if self.resize_ratio != "auto":
            if isinstance(self.resize_ratio, str):
                raise ValueError(f"resize_ratio={self.resize_ratio!r} is neither 'auto' nor a number in [0, 1)")
            _check_share("resize_ratio", self.resize_ratio)
            if self.resize_ratio > self.max_resize:
                raise ValueError(
                    f"resize_ratio={self.resize_ratio} is above max_resize={self.max_resize}; lower it, or raise that"
                )
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay={self.decay} is outside [0, 1]")
        if not (self.variation_threshold >= 0.0 and math.isfinite(self.variation_threshold)):
            raise ValueError(f"variation_threshold={self.variation_threshold} must be a number ≥ 0")
        for name in ("threshold", "margin"):
            value = getattr(self, name)
            if not (value > 0.0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} must be a positive number (0.1 stands for 10 %)")
        for name, least in (("patience", 1), ("warmup_iterations", 0), ("grain", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.priority_interval is not None and self.priority_interval < 1:
            raise ValueError(f"priority_interval={self.priority_interval} must be at least 1 iteration, or None")


def _check_choice(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"unknown {name} {value!r}; valid are {', '.join(valid)}")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1): it is a share of the work that is pruned")
