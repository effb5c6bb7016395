"""What a balance configuration refuses, and how it says so; and that deciding needs no torch."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from colossal_hetero.balance import BalanceConfig

CHOICES = {
    "mode": ("off", "resize", "migrate", "semi", "auto"),
    "migration": ("block", "broadcast-reduce", "scatter-gather"),
    "resizing": ("column", "block"),
    "reference": ("minimum", "mean"),
    "priority": ("random", "priority", "priority-diff", "norm-product"),
    "imputation": ("zero", "average", "same"),
    "ratio_form": ("budgeted", "printed"),
}


def assert_refused(*words: str, **options: Any) -> None:
    """The error names each of ``words``."""
    with pytest.raises(ValueError) as caught:
        BalanceConfig(**options)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("bad", ["fast", "", "Off", None, 1])
def test_unknown_choices(name: str, bad: Any) -> None:
    assert_refused(f"unknown {name} {bad!r}", f"valid are {', '.join(CHOICES[name])}", **{name: bad})


@pytest.mark.parametrize("name, choice", [(name, choice) for name, choices in CHOICES.items() for choice in choices])
def test_known_choices(name: str, choice: str) -> None:
    assert getattr(BalanceConfig(**{name: choice}), name) == choice


@pytest.mark.parametrize("name", ["max_resize", "resize_ratio"])
@pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5, float("nan"), float("inf")])
def test_shares_outside_their_range(name: str, bad: float) -> None:
    assert_refused(f"{name}={bad} is outside [0, 1)", **{name: bad})


def test_units_are_given_away_for_good_only_in_exact_modes_that_move_blocks() -> None:
    assert_refused("reshard_after=0", "at least 1", "None for never", reshard_after=0)
    assert BalanceConfig(mode="auto").reshards and BalanceConfig(mode="migrate", reshard_after=1).reshards
    for options in (
        dict(reshard_after=None),
        dict(max_resize=0.5),
        dict(migration="broadcast-reduce"),
        dict(mode="semi"),
        dict(mode="off"),
    ):
        assert not BalanceConfig(**(dict(mode="auto") | options)).reshards, options  # type: ignore[arg-type]


def test_imputation_of_whole_units() -> None:
    assert_refused("imputation='same'", "resizing='block'", "resizing='column'", mode="resize", imputation="same")
    assert BalanceConfig(mode="resize", resizing="column", imputation="same").imputation == "same"


def test_resize_ratio_that_is_no_number() -> None:
    assert_refused("resize_ratio='half'", "'auto'", "[0, 1)", resize_ratio="half")


def test_resize_ratio_above_the_cap() -> None:
    assert_refused("resize_ratio=0.8", "max_resize=0.5", "lower it or raise that", resize_ratio=0.8, max_resize=0.5)
    assert BalanceConfig(resize_ratio=0.5, max_resize=0.5).resize_ratio == 0.5


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_decay(bad: float) -> None:
    assert_refused(f"decay={bad} is outside [0, 1]", decay=bad)


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_variation_threshold(bad: float) -> None:
    assert_refused(f"variation_threshold={bad} must be a number ≥ 0", variation_threshold=bad)


@pytest.mark.parametrize("name", ["threshold", "margin"])
@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf")])
def test_tolerances(name: str, bad: float) -> None:
    assert_refused(f"{name}={bad} must be a positive number", **{name: bad})


@pytest.mark.parametrize(
    "name, bad, least", [("patience", 0, 1), ("warmup_iterations", -1, 0), ("priority_interval", 0, 1), ("grain", 0, 1)]
)
def test_counts(name: str, bad: int, least: int) -> None:
    assert_refused(f"{name}={bad} must be at least {least}", **{name: bad})


@pytest.mark.parametrize("mode, most", [("off", 0.9), ("resize", 0.9), ("migrate", 0.9), ("semi", 0.9), ("auto", 0.0)])
def test_auto_is_exact_by_default(mode: Any, most: float) -> None:
    assert BalanceConfig(mode=mode).max_resize == most
    assert BalanceConfig(mode=mode, max_resize=0.5).max_resize == 0.5
    assert BalanceConfig(mode=mode) == BalanceConfig(mode=mode, max_resize=most)


def test_a_copy_with_another_mode_keeps_the_share() -> None:
    assert dataclasses.replace(BalanceConfig(mode="auto", max_resize=0.5), mode="semi").max_resize == 0.5


def test_is_immutable_and_by_keyword() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BalanceConfig().mode = "resize"  # type: ignore[misc]
    with pytest.raises(TypeError):
        BalanceConfig("resize")  # type: ignore[misc]


def test_nothing_is_pruned_by_default() -> None:
    assert BalanceConfig().mode == "off"


@pytest.mark.parametrize("imported", ["colossal_hetero", "colossal_hetero.balance"])
def test_deciding_needs_neither_torch_nor_colossalai(imported: str) -> None:
    """It is to start in a fraction of a second, and to run where neither is installed."""
    script = (
        f"import {imported}, sys\n"
        "from colossal_hetero import BalanceConfig\n"
        "from colossal_hetero.balance import BalancePlan, RankTimes, decide\n"
        "from colossal_hetero.balance.plan import Costs\n"
        "import colossal_hetero.balance.work_times, colossal_hetero.balance.divide\n"
        "import colossal_hetero.balance.report\n"
        "import colossal_hetero.balance.report, colossal_hetero.balance.group_speed\n"
        "times = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)]\n"
        "for mode in ('off', 'resize', 'migrate', 'semi', 'auto'):\n"
        "    decide(times, Costs(), BalanceConfig(mode=mode), BalancePlan.idle(2))\n"
        "print([name for name in ('torch', 'colossalai', 'timm', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[\]\s*", done.stdout), f"imported {done.stdout}"
