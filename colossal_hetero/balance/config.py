"""Configuration of balancing."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from ..common.methods import with_checked_names

Mode = Literal["off", "resize", "migrate", "semi", "auto"]
Migration = Literal["block", "broadcast-reduce", "scatter-gather"]
Resizing = Literal["column", "block"]
Priority = Literal["random", "priority", "priority-diff", "norm-product"]
Reference = Literal["minimum", "mean"]
Imputation = Literal["zero", "average", "same"]
RatioForm = Literal["budgeted", "printed"]


@with_checked_names
@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Settings of how slow ranks prune their work, which is lossy."""

    priority: Priority = "norm-product"
    """Rule for pruned columns: ``random``, ``priority`` (smallest weight variation), ``priority-diff`` (the same with a
    ratio per layer) or ``norm-product`` (smallest ‖X column‖·‖W column‖). The ``priority`` rules keep a copy of the
    weights on every rank, to know how they vary."""
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
    resizing: Resizing = "block"
    """Form of pruning in mode ``resize``: whole units of a ``block`` (hidden neurons, heads), or contraction columns of
    each product (``column``, as in SEMI), as always in layers in no block. Other modes prune as they migrate."""
    reference: Reference = "minimum"
    """T_ref, to which slow ranks are reduced in mode ``resize`` (Eq. 1). With the ``minimum`` over the group no rank
    waits; with the ``mean``, the paper's choice for resizing alone, less is pruned."""
    resize_ratio: float | Literal["auto"] = "auto"
    """γ of every slow rank in mode ``resize``: ``auto`` by Eq. 1, or a fixed share in [0, 1) (½ in SEMI's suffix E)."""
    every_rank: bool = False
    """True if in mode ``resize`` every rank prunes a fixed ``resize_ratio``, also where none is slow (SEMI, Figs. 5 and
    6), so that what pruning costs and saves can be seen apart from what makes a rank slow."""
    resize_overhead: float = 0.08
    """Time that selecting and imputing columns adds to a rank's products, as a share of their full time, in [0, 1).
    With ``resize_ratio="auto"`` mode ``resize`` prunes that much more than Eq. 1, so that the rank reaches T_ref."""
    seed: int = 0
    """Seed of what is drawn: random columns, and columns between which a rule does not decide."""

    def __post_init__(self) -> None:
        kinds = dict(resizing=Resizing, reference=Reference, priority=Priority)
        for name, kind in (kinds | dict(imputation=Imputation, ratio_form=RatioForm)).items():
            _check_choice(name, getattr(self, name), get_args(kind))
        if not 0.0 <= self.resize_overhead < 1.0:
            raise ValueError(f"resize_overhead={self.resize_overhead} is outside [0, 1): a share of the products' time")
        if self.resize_ratio != "auto":
            if isinstance(self.resize_ratio, str):
                raise ValueError(f"resize_ratio={self.resize_ratio!r} is neither 'auto' nor a number in [0, 1)")
            _check_share("resize_ratio", self.resize_ratio)
        elif self.every_rank:
            raise ValueError("every_rank=True needs a fixed resize_ratio, such as 0.5; 'auto' is for slow ranks")
        if not 0.0 <= self.decay <= 1.0:
            raise ValueError(f"decay={self.decay} is outside [0, 1]")
        if not (self.variation_threshold >= 0.0 and math.isfinite(self.variation_threshold)):
            raise ValueError(f"variation_threshold={self.variation_threshold} must be a number ≥ 0")
        _check_count("priority_interval", self.priority_interval, 1)
        if self.priority != "priority-diff":
            _refuse(self, ("ratio_form", "decay", "variation_threshold"), f"with priority={self.priority!r}")
        if self.priority in ("random", "norm-product"):
            _refuse(self, ("priority_interval",), f"with priority={self.priority!r}")


@with_checked_names
@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Settings of how the work of a tensor-parallel group is balanced. The default, ``mode="auto"``, is exact; accuracy
    can be reduced only by ``mode="resize"``, ``mode="semi"``, or ``max_resize`` in mode ``auto``."""

    mode: Mode = "auto"
    """``off`` only measures. ``resize`` prunes work of slow ranks, which is lossy. ``migrate`` gives their work to fast
    ranks, which is exact. ``semi`` lets the slowest ranks migrate and other slow ranks resize (SEMI, Algorithm 2).
    ``auto`` migrates, and with ``max_resize`` prunes, so that the predicted iteration time is minimal."""
    max_resize: float | None = None
    """γ_max: the largest share of its work that a rank may prune, in [0, 1); 0 means never to prune. None means 0.9 in
    modes ``resize`` and ``semi``, and 0 in mode ``auto``. Modes ``off`` and ``migrate`` never prune."""
    pruning: Pruning | None = None
    """How slow ranks prune, where they do. None means the defaults of :class:`Pruning`."""
    migration: Migration = "block"
    """Form of migration: ``block`` migrates whole units of a block of layers; ``broadcast-reduce`` and
    ``scatter-gather`` migrate columns of each product, as in SEMI."""
    head: bool = True
    """True if rows of the vocabulary-parallel head of a language model migrate like units of a block, where nothing is
    pruned. Then a slow rank computes ``logits`` of training passes with ``labels`` when they are first used."""
    measure_costs: bool = True
    """When a rank is slow, modes ``semi`` and ``auto`` measure the costs of pruning and migrating, in a few
    seconds. With False they are zero."""
    threshold: float = 0.10
    """A rank's speed has changed if its work differs from that of its group by more than this share in ``patience``
    successive iterations; must be positive. Smaller changes are accepted after more iterations. In modes that prune, or
    migrate columns, a rank is slow if it takes more than (1 + threshold)·T_ref. There a plan is replaced only if that
    saves more than this share of the iteration, and a first plan is applied only if it saves more than half of it.
    Modes that only migrate whole units compare with the noise that is measured instead."""
    patience: int = 2
    """Consecutive iterations after which a change of speed is accepted, ≥ 1; more after a speed has flickered."""
    reshard_after: int | None = 50
    """Successive iterations, ≥ 1, after which units of a relieved rank are permanently re-sharded: weights and
    optimizer state move once, and nothing is sent in each iteration any more. They are taken back when the rank
    recovers. None means never. It needs ``migration="block"`` and a mode that prunes nothing."""
    warmup_iterations: int = 2
    """Number of first iterations that are ignored (allocation, caches), ≥ 0."""

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, get_args(Mode))
        _check_choice("migration", self.migration, get_args(Migration))
        if not isinstance(self.measure_costs, bool):
            raise TypeError(f"measure_costs={self.measure_costs!r} is neither True nor False")
        if not isinstance(self.pruning, Pruning | None):
            raise TypeError(f"pruning={self.pruning!r} is not a Pruning; write pruning=Pruning(...)")
        if not (self.threshold > 0.0 and math.isfinite(self.threshold)):
            raise ValueError(f"threshold={self.threshold} must be a positive number (0.1 means 10 %)")
        _check_count("patience", self.patience, 1)
        _check_count("warmup_iterations", self.warmup_iterations, 0)
        if self.reshard_after is not None and self.reshard_after < 1:
            raise ValueError(f"reshard_after={self.reshard_after} must be at least 1 iteration, or None for never")
        if self.max_resize is not None:
            _check_share("max_resize", self.max_resize)
        where = f"in mode {self.mode!r}"
        if self.pruning is not None:
            if self.mode in ("off", "migrate"):
                raise ValueError(f"pruning=Pruning(...) has no effect {where}, which never prunes; leave it out")
            if self.mode == "auto" and not self.max_resize:
                raise ValueError(
                    "pruning=Pruning(...) has no effect in mode 'auto' without max_resize, the largest share of its "
                    "work that a rank may prune; set both, or leave it out"
                )
            if self.mode != "resize":
                _refuse(self.pruning, ("resizing", "reference", "resize_ratio", "every_rank", "resize_overhead"), where)
        ratio = self.rules.resize_ratio
        if self.mode == "resize" and ratio != "auto" and ratio > self.largest_resize:
            raise ValueError(f"resize_ratio={ratio} is above max_resize={self.largest_resize}; lower it or raise that")
        if self.mode in ("off", "resize"):
            _refuse(self, ("migration",), f"{where}, which never migrates")
        if self.reshard_after is not None and not self.reshards:
            _refuse(self, ("reshard_after",), f"{where} with these settings: only whole units move for good")
        if self.mode == "resize" and self.rules.resizing == "block" and self.rules.imputation != "zero":
            raise ValueError(
                f"imputation={self.rules.imputation!r} needs pruned columns, but resizing='block' prunes whole units, "
                "whose gradients are zero; choose resizing='column' or imputation='zero'"
            )

    @classmethod
    def paper(cls, name: str, **settings: Any) -> BalanceConfig:
        """The settings of a method that SEMI compares.

        Args:
            name: ``zero-rd`` prunes random columns, ``zero-pri`` those whose weights vary least, ``zero-pridiff-r`` the
                same with a ratio per layer, each by γ of Eq. 1; ``zero-pridiff-e`` has γ = ½ instead. ``mig`` only
                migrates, ``semi`` is Algorithm 2.
            settings: further fields of this class or of :class:`Pruning`, such as ``patience`` or ``decay``.

        Raises:
            ValueError: the name is unknown, or a setting is impossible.
        """
        _check_choice("method", name, PAPER_METHODS)
        preset = dict(_PAPER[name])
        rules = {each.name: settings.pop(each.name) for each in fields(Pruning) if each.name in settings}
        if "pruning" in settings:
            raise ValueError(f"pruning= would replace that of {name!r}; give its fields instead, such as decay=0.5")
        if rules:
            preset["pruning"] = replace(preset.get("pruning", Pruning()), **rules)
        return cls(**(preset | settings))

    @property
    def rules(self) -> Pruning:
        return self.pruning or Pruning()

    @property
    def largest_resize(self) -> float:
        """γ_max of the mode; 0 if it never prunes."""
        if self.mode in ("off", "migrate"):
            return 0.0
        default = 0.0 if self.mode == "auto" else 0.9
        return default if self.max_resize is None else self.max_resize

    @property
    def is_exact(self) -> bool:
        """True if nothing is ever pruned."""
        return self.mode in ("migrate", "auto") and self.largest_resize == 0.0

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
            return self.rules.resizing == "block"
        return self.mode != "off" and self.migration == "block"


def _refuse(settings: Any, names: tuple[str, ...], where: str) -> None:
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name in names and value != each.default:
            raise ValueError(f"{each.name}={value!r} has no effect {where}; leave it out")


def _check_choice(name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"unknown {name} {value!r}; valid are {', '.join(valid)}")


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1): it is a share of the work that is pruned")


def _check_count(name: str, value: int | None, minimum: int) -> None:
    if value is not None and value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")


def _columns(priority: Priority, resize_ratio: float | Literal["auto"] = "auto") -> dict[str, Any]:
    """Resizing alone as in the paper; a ratio per layer as printed."""
    form: RatioForm = "printed" if priority == "priority-diff" else "budgeted"
    rules = Pruning(priority=priority, ratio_form=form, resize_ratio=resize_ratio, resizing="column")
    return {"mode": "resize", "pruning": replace(rules, reference="mean", resize_overhead=0.0)}


_PAPER: dict[str, dict[str, Any]] = {
    "zero-rd": _columns("random"),
    "zero-pri": _columns("priority"),
    "zero-pridiff-e": _columns("priority-diff", 0.5),
    "zero-pridiff-r": _columns("priority-diff"),
    "mig": {"mode": "migrate", "migration": "broadcast-reduce"},
    "semi": {
        "mode": "semi",
        "migration": "broadcast-reduce",
        "pruning": Pruning(priority="priority-diff", ratio_form="printed"),
    },
}

PAPER_METHODS = tuple(_PAPER)
