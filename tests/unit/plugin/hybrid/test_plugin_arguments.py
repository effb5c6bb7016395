"""Arguments of the plugin that follow from a plan."""

from __future__ import annotations

import pytest

from colossal_hetero.plugin.hybrid.plugin_arguments import arguments_from_plan
from tests.unit.planner.plans.test_plan import plan

pytestmark = pytest.mark.unit


def test_a_plan_that_counts_on_zero_needs_it() -> None:
    made = plan(precision="bf16", zero_stage=1)
    with pytest.raises(ValueError, match="the plan counts on ZeRO stage 1"):
        arguments_from_plan(made, made.replicas[0], {"zero_stage": 0})
    for stage in (1, 2):
        assert arguments_from_plan(made, made.replicas[0], {"zero_stage": stage})["zero_stage"] == stage
    plain = plan()
    assert "zero_stage" not in arguments_from_plan(plain, plain.replicas[0], {})
