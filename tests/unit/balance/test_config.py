"""Configurations of balancing: what modes prune, defaults, presets of the paper; when NCCL cannot be balanced over."""

import dataclasses
import re
from typing import Any

from colossal_hetero.balance import BalanceConfig, Pruning
from colossal_hetero.balance.host_messages import launch_obstacle


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


IMPLICIT, ONE = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_an_order_of_launches_that_may_change_is_refused() -> None:
    """Operations of two communicators must run in the order in which they were launched."""
    for nccl, environment, set_late, keeps_order in (
        *(((2, 26, 2), IMPLICIT, True, True), ((2, 27, 5), IMPLICIT | ONE, True, True)),
        *(((2, 21, 5), IMPLICIT | ONE, False, True), ((2, 21, 5), IMPLICIT | ONE, True, False)),
        *(((2, 21, 5), IMPLICIT, False, False), ((2, 26, 2), ONE, True, False), ((2, 26, 2), {}, False, False)),
    ):
        words = launch_obstacle(nccl, environment, set_late)
        refused = r"wait for each other forever: NCCL 2\.2.*import colossal_hetero before"
        assert words is None if keeps_order else re.search(refused, words or "")
