"""What a balance configuration refuses, and how it says so; and that deciding needs no torch."""

import dataclasses
import subprocess
import sys
from itertools import product
from typing import Any

import pytest

from colossal_hetero.balance import BalanceConfig, Pruning

CHOICES: dict[type, dict[str, tuple[str, ...]]] = {
    BalanceConfig: {
        "mode": ("off", "resize", "migrate", "semi", "auto"),
        "migration": ("block", "broadcast-reduce", "scatter-gather"),
    },
    Pruning: {
        "resizing": ("column", "block"),
        "reference": ("minimum", "mean"),
        "priority": ("random", "priority", "priority-diff", "norm-product"),
        "imputation": ("zero", "average", "same"),
        "ratio_form": ("budgeted", "printed"),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CHOICES.items() for name in names])
def test_choices(kind: type, name: str) -> None:
    for bad in ("fast", "", "Off", None, 1):
        with pytest.raises(ValueError, match=rf"unknown {name} {bad!r}; valid are {', '.join(CHOICES[kind][name])}"):
            kind(**{name: bad})
    for choice in CHOICES[kind][name]:
        # What an option needs to have an effect.
        needed: dict[str, Any] = {"migration": {"mode": "migrate"}, "ratio_form": {"priority": "priority-diff"}}
        assert getattr(kind(**(needed.get(name, {}) | {name: choice})), name) == choice


NAN, INFINITE = float("nan"), float("inf")
OUTSIDE = (-0.1, 1.0, 1.5, NAN, INFINITE)
NUMBERS: list[tuple[type, str, tuple[Any, ...], str]] = [
    (BalanceConfig, "max_resize", OUTSIDE, "is outside [0, 1)"),
    (Pruning, "resize_ratio", OUTSIDE, "is outside [0, 1)"),
    (Pruning, "resize_overhead", OUTSIDE, "is outside [0, 1)"),
    (Pruning, "decay", (-0.1, 1.1, NAN), "is outside [0, 1]"),
    (Pruning, "variation_threshold", (-1e-9, NAN, INFINITE), "must be a number ≥ 0"),
    (Pruning, "priority_interval", (0,), "must be at least 1"),
    (BalanceConfig, "threshold", (0.0, -0.1, NAN, INFINITE), "must be a positive number"),
    (BalanceConfig, "patience", (0,), "must be at least 1"),
    (BalanceConfig, "warmup_iterations", (-1,), "must be at least 0"),
    (BalanceConfig, "reshard_after", (0,), "must be at least 1 iteration, or None for never"),
]
IN_BLOCK_FORM = dict(resizing="column", reference="mean", resize_ratio=0.5, resize_overhead=0.0)
OF_PRIORITIES = dict(ratio_form="printed", decay=0.5, variation_threshold=0.1, priority_interval=3)
IMPOSSIBLE: list[tuple[type, dict[str, Any], list[str]]] = [
    *((kind, {name: bad}, [f"{name}={bad} {words}"]) for kind, name, every, words in NUMBERS for bad in every),
    (Pruning, dict(resize_ratio="half"), ["resize_ratio='half'", "'auto'", "[0, 1)"]),
    (Pruning, dict(every_rank=True), ["every_rank=True needs a fixed resize_ratio"]),
    *(
        (
            BalanceConfig,
            dict(mode="resize", pruning=Pruning(resize_ratio=0.95), max_resize=most),
            ["resize_ratio=0.95", f"max_resize={most or 0.9}", "lower it or raise that"],
        )
        for most in (None, 0.5)
    ),
    (
        BalanceConfig,
        dict(mode="resize", pruning=Pruning(imputation="same")),
        ["imputation='same'", "resizing='block'", "resizing='column'"],
    ),
    (BalanceConfig, dict(mode="resize", pruning=0.5), ["pruning=0.5 is not a Pruning; write pruning=Pruning"]),
    # Without an effect:
    *((BalanceConfig, dict(mode=mode, pruning=Pruning()), ["pruning=", mode, "prunes"]) for mode in ("off", "migrate")),
    *(
        (BalanceConfig, dict(mode="auto", pruning=Pruning(), max_resize=most), ["no effect", "without max_resize"])
        for most in (None, 0.0)
    ),
    *(
        (
            BalanceConfig,
            dict(mode=mode, max_resize=0.5, pruning=Pruning(**{name: value})),
            [f"{name}={value!r} has no effect", mode],
        )
        for mode, (name, value) in product(("semi", "auto"), IN_BLOCK_FORM.items())
    ),
    *(
        (Pruning, {name: value}, [f"{name}={value!r} has no effect with priority='norm-product'"])
        for name, value in OF_PRIORITIES.items()
    ),
    *(
        (BalanceConfig, dict(mode=mode, migration="scatter-gather"), ["migration='scatter-gather' has no effect", mode])
        for mode in ("off", "resize")
    ),
    *(
        (BalanceConfig, dict(reshard_after=9) | options, ["reshard_after=9 has no effect", "whole units"])
        for options in (dict(mode="semi"), dict(mode="migrate", migration="broadcast-reduce"))
    ),
]


@pytest.mark.parametrize(("kind", "options", "words"), IMPOSSIBLE)
def test_impossible_settings(kind: type, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        kind(**options)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.mark.parametrize("mode, most", [("off", 0), ("resize", 0.9), ("migrate", 0), ("semi", 0.9), ("auto", 0)])
def test_what_a_mode_prunes(mode: Any, most: float) -> None:
    assert BalanceConfig(mode=mode).largest_resize == most
    assert BalanceConfig(mode=mode).is_exact == (mode in ("migrate", "auto"))
    limited = BalanceConfig(mode=mode, max_resize=0.3)
    assert limited.largest_resize == (0.3 if mode in ("resize", "semi", "auto") else 0.0)
    assert limited.is_exact == (mode == "migrate")


def test_the_default_and_units_that_are_given_away_for_good() -> None:
    """Only in exact modes that move blocks."""
    assert BalanceConfig().mode == "auto" and len(dataclasses.fields(BalanceConfig)) <= 10
    assert BalanceConfig(mode="auto").reshards and BalanceConfig(mode="migrate", reshard_after=1).reshards
    for options in (
        *(dict(reshard_after=None), dict(max_resize=0.5), dict(migration="broadcast-reduce")),
        *(dict(mode="semi"), dict(mode="off")),
    ):
        assert not BalanceConfig(**(dict(mode="auto") | options)).reshards, options  # type: ignore[arg-type]


def resizing(**rules: Any) -> BalanceConfig:
    pruning = Pruning(resizing="column", reference="mean", resize_overhead=0.0, **rules)
    return BalanceConfig(mode="resize", pruning=pruning)


PRINTED = dict(priority="priority-diff", ratio_form="printed")
PRESETS = {
    "zero-rd": resizing(priority="random"),
    "zero-pri": resizing(priority="priority"),
    "zero-pridiff-e": resizing(resize_ratio=0.5, **PRINTED),
    "zero-pridiff-r": resizing(**PRINTED),
    "mig": BalanceConfig(mode="migrate", migration="broadcast-reduce"),
    "semi": BalanceConfig(mode="semi", migration="broadcast-reduce", pruning=Pruning(**PRINTED)),  # type: ignore[arg-type]
}


def test_presets_of_the_paper() -> None:
    for name, config in PRESETS.items():
        assert BalanceConfig.paper(name) == config
        assert BalanceConfig.paper(name, patience=3) == dataclasses.replace(config, patience=3)
    found = BalanceConfig.paper("semi", decay=0.5, max_resize=0.4)
    rules = dataclasses.replace(PRESETS["semi"].rules, decay=0.5)
    assert found == dataclasses.replace(PRESETS["semi"], pruning=rules, max_resize=0.4)
    for name, options, words in (
        ("zero", {}, r"unknown method 'zero'; valid are zero-rd, .*, mig, semi"),
        ("semi", dict(pruning=Pruning()), r"would replace that of 'semi'.*decay=0\.5"),
        ("mig", dict(seed=1), "never prunes"),
    ):
        with pytest.raises(ValueError, match=words):
            BalanceConfig.paper(name, **options)


def test_deciding_needs_neither_torch_nor_colossalai() -> None:
    """It is to start in a fraction of a second, and to run where neither is installed."""
    script = (
        "import sys\n"
        "from colossal_hetero import BalanceConfig\n"
        "from colossal_hetero.balance import BalancePlan, RankTimes, decide\n"
        "from colossal_hetero.balance.plan import Costs\n"
        "import colossal_hetero.balance.group_speed, colossal_hetero.balance.report\n"
        "times = [RankTimes(1.0, 1.0), RankTimes(4.0, 4.0)]\n"
        "for mode in ('off', 'resize', 'migrate', 'semi', 'auto'):\n"
        "    decide(times, Costs(), BalanceConfig(mode=mode), BalancePlan.idle(2))\n"
        "print([name for name in ('torch', 'colossalai', 'timm', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "[]", f"imported {done.stdout}, {done.stderr}"
