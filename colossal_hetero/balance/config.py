"""Configuration of balancing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["off", "resize", "migrate", "semi", "auto"]
Migration = Literal["block", "broadcast-reduce", "scatter-gather"]
Resizing = Literal["column", "block"]
Priority = Literal["random", "priority", "priority-diff", "norm-product"]
Reference = Literal["minimum", "mean"]
Imputation = Literal["zero", "average", "same"]
RatioForm = Literal["budgeted", "printed"]


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Settings of how the work of a tensor-parallel group is balanced. By default nothing is changed. ``mode="auto"``
    is exact; accuracy can be reduced only by ``mode="resize"``, ``mode="semi"``, or a positive ``max_resize``."""

    mode: Mode = "off"
    """``off`` only measures. ``resize`` prunes work of slow ranks, which is lossy. ``migrate`` gives their work to fast
    ranks, which is exact. ``semi`` lets the slowest ranks migrate and other slow ranks resize (SEMI, Algorithm 2).
    ``auto`` migrates and, if ``max_resize`` is positive, prunes so that the predicted iteration time is minimal."""
    max_resize: float = None  # type: ignore[assignment]
    """γ_max: the largest share of its work that a rank may prune, in [0, 1); 0 means never to prune. None, the default,
    means 0 in mode ``auto``, which is therefore exact, and 0.9 in the other modes. Mode ``migrate`` never prunes."""
    migration: Migration = "block"
    """Form of migration: ``block`` migrates whole units of a block of layers; ``broadcast-reduce`` and
    ``scatter-gather`` migrate columns of each product, as in SEMI."""
    head: bool = True
    """True if rows of the vocabulary-parallel head of a language model migrate like units of a block, where nothing is
    pruned. Then a slow rank computes ``logits`` of training passes with ``labels`` when they are first used."""
    resizing: Resizing = "block"
    """Form of pruning in mode ``resize``: whole units of a ``block`` (hidden neurons, heads), or contraction columns of
    each product (``column``, as in SEMI), as always in layers in no block. Other modes prune as they migrate."""
    grain: int = 64
    """Maximum number of units that are pruned or migrated together, ≥ 1: matrix products are faster for round sizes.
    Layers with few units use a smaller grain."""
    measure_costs: bool = True
    """Measure the costs of pruning and migrating in a few seconds before training; if not, they count as zero."""
    cost_cache: str | None = None
    """Folder of measured costs, for the next run on the same devices. None means ``$XDG_CACHE_HOME/colossal_hetero`` or
    ``~/.cache/colossal_hetero``; "" means not to keep them."""
    reference: Reference = "minimum"
    """T_ref, to which slow ranks are reduced in mode ``resize`` (Eq. 1). With the ``minimum`` over the group no rank
    waits; with the ``mean``, the paper's choice for resizing alone, less is pruned."""
    resize_ratio: float | Literal["auto"] = "auto"
    """γ of every slow rank in mode ``resize``: ``auto`` by Eq. 1, or a fixed share in [0, 1) (½ in SEMI's suffix E)."""
    resize_overhead: float = 0.08
    """Time that selecting and imputing columns adds to a rank's products, as a share of their full time, in [0, 1).
    With ``resize_ratio="auto"`` mode ``resize`` prunes that much more than Eq. 1, so that the rank reaches T_ref."""
    priority: Priority = "norm-product"
    """Rule for pruned columns: ``random``, ``priority`` (smallest weight variation), ``priority-diff`` (the same with a
    ratio per layer) or ``norm-product`` (smallest ‖X column‖·‖W column‖)."""
    imputation: Imputation = "zero"
    """The gradients at pruned columns: ``zero``, the ``average`` of the kept columns, or the ``same`` as before. Units
    of blocks always have zero gradients while they are pruned."""
    priority_interval: int | None = None
    """Iterations between two updates of the weight variations. None means an epoch if the data loader that is passed to
    ``booster.boost`` has a length, otherwise 100."""
    ratio_form: RatioForm = "budgeted"
    """Ratios of ``priority-diff``: ``budgeted`` keeps the total time of Eq. 1, ``printed`` follows Algorithm 1."""
    decay: float = 0.8
    """α of ``priority-diff``, in [0, 1]: before budgeting, a layer's ratio is at least α·γ."""
    variation_threshold: float = 1e-3
    """θ_iter of ``priority-diff``, ≥ 0: columns that change less than this per iteration are candidates for pruning."""
    threshold: float = 0.10
    """A rank's speed has changed if its work differs from that of its group by more than this share in ``patience``
    successive iterations; must be positive. Smaller changes are accepted after more iterations."""
    margin: float = 0.10
    """Threshold in modes that prune; must be positive. A rank is slow if it takes more than (1 + margin)·T_ref. A plan
    is replaced only if that saves more than this share of the iteration, and a first plan is applied only if it saves
    more than half of it. Modes that only migrate compare with the noise that is measured instead."""
    patience: int = 2
    """Consecutive iterations after which a change of speed is accepted, ≥ 1; more after a speed has flickered."""
    reshard_after: int | None = 50
    """Successive iterations, ≥ 1, after which units of a relieved rank are given away for good: weights and optimizer
    state move once, and nothing is sent in each iteration any more. They are taken back when the rank recovers. None
    means never. It needs ``migration="block"`` and a mode that prunes nothing."""
    warmup_iterations: int = 2
    """Number of first iterations that are ignored (allocation, caches), ≥ 0."""
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
        if self.mode == "resize" and self.resizing == "block" and self.imputation != "zero":
            raise ValueError(
                f"imputation={self.imputation!r} needs pruned columns, but resizing='block' prunes whole units, whose "
                "gradients are zero; choose resizing='column' or imputation='zero'"
            )
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
                    f"resize_ratio={self.resize_ratio} is above max_resize={self.max_resize}; lower it or raise that"
                )
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay={self.decay} is outside [0, 1]")
        if not (self.variation_threshold >= 0.0 and math.isfinite(self.variation_threshold)):
            raise ValueError(f"variation_threshold={self.variation_threshold} must be a number ≥ 0")
        for name in ("threshold", "margin"):
            value = getattr(self, name)
            if not (value > 0.0 and math.isfinite(value)):
                raise ValueError(f"{name}={value} must be a positive number (0.1 means 10 %)")
        for name, minimum in (("patience", 1), ("warmup_iterations", 0), ("grain", 1)):
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {minimum}")
        if self.reshard_after is not None and self.reshard_after < 1:
            raise ValueError(f"reshard_after={self.reshard_after} must be at least 1 iteration, or None for never")
        if self.priority_interval is not None and self.priority_interval < 1:
            raise ValueError(f"priority_interval={self.priority_interval} must be at least 1 iteration, or None")

    @property
    def is_exact(self) -> bool:
        """True if nothing is ever pruned."""
        return self.mode == "migrate" or (self.mode == "auto" and self.max_resize == 0.0)

    @property
    def reshards(self) -> bool:
        return self.reshard_after is not None and self.is_exact and self.moves_blocks

    @property
    def moves_heads(self) -> bool:
        return self.head and self.is_exact and self.moves_blocks

    @property
    def moves_blocks(self) -> bool:
        """True if whole units of blocks are pruned and migrated, rather than columns of single products."""
        if self.mode == "resize":
            return self.resizing == "block"
        return self.mode != "off" and self.migration == "block"


def _check_choice(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"unknown {name} {value!r}; valid are {', '.join(valid)}")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1): it is a share of the work that is pruned")
