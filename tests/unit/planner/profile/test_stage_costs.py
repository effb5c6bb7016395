"""Costs of stages with recomputation or a divided optimizer state, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from tests.support.layer_profiles import layer_times

pytestmark = pytest.mark.unit


def model(**changes: Any) -> ModelProfile:
    """An embedding, three blocks and a head, measured with 1, 2 and 8 samples; a block takes as long as it has samples,
    backward twice as long."""
    times = tuple(
        layer_times(
            "gpu",
            (0.5, *(float(size),) * 3, 0.25),
            micro_batch=size,
            update_seconds=(0.0, 6.0, 6.0, 6.0, 0.0),
            schedule_seconds=0.1 * size,
        )
        for size in (1, 2, 8)
    )
    sizes = LayerSizes(
        parameter_bytes=(10, 100, 100, 100, 20),
        activation_bytes=(1, 40, 50, 60, 90),
        output_bytes=(3, 5, 6, 7, 0),
        temporary_bytes=(0, 11, 12, 13, 0),
    )
    return ModelProfile(name="net", times=times, sizes=(sizes,), **{"state_factor": 8.0, **changes})


def test_a_stage_that_recomputes_keeps_the_inputs_of_its_blocks() -> None:
    profile = model()
    plain = profile.costs("gpu", 1, 2)
    again = profile.costs("gpu", 1, 2, recompute=True)
    np.testing.assert_allclose(again.forward_seconds, [2.5, 2.0, 2.25])
    np.testing.assert_allclose(again.backward_seconds, [5.0 + 2.5, 4.0 + 2.0, 4.5 + 2.25])
    # The last block needs 2 · (60 + 90) bytes for a moment, of which 2 · 50 are in the temporary bytes of all stages.
    np.testing.assert_allclose(again.activation_bytes, [2 * 5, 2 * 5, 2 * 6 + 2 * 100])
    assert again.temporary_bytes == plain.temporary_bytes + 2 * 50
    assert (again.state_bytes == plain.state_bytes).all() and (again.update_seconds == plain.update_seconds).all()
    assert again is profile.costs("gpu", 1, 2, recompute=True)
    assert not again.activation_bytes.flags.writeable


def test_shards_of_the_optimizer_state() -> None:
    profile = model(precision="bf16")
    costs = profile.costs("gpu", 1, 2, zero_shards=3)
    # Parameters and gradients are whole; the other six eighths are in three parts.
    np.testing.assert_allclose(costs.state_bytes, [110 * (2 + 6 / 3), 100 * 4.0, 120 * 4.0])
    np.testing.assert_allclose(costs.update_seconds, [2.0, 2.0, 2.0])
    assert costs is profile.costs("gpu", 1, 2, zero_shards=3)
    # A model whose optimizer keeps nothing has nothing to divide.
    nothing = model(state_factor=2.0, precision="bf16")
    without = nothing.costs("gpu", 1, 2, zero_shards=3)
    np.testing.assert_allclose(without.state_bytes, [220, 200, 240])


def test_zero_in_fp32_copies_its_part_of_the_parameters() -> None:
    costs = model(state_factor=4.0).costs("gpu", 1, 2, zero_shards=2)
    # Two moments in stage 0; with ZeRO also the copy.
    np.testing.assert_allclose(costs.state_bytes, [110 * (2 + 3 / 2), 100 * 3.5, 120 * 3.5])
    counted = model(state_factor=5.0, master_copies=True)
    costs = counted.costs("gpu", 1, 2, zero_shards=2)
    np.testing.assert_allclose(costs.state_bytes, [110 * (2 + 3 / 2), 100 * 3.5, 120 * 3.5])


def test_both_together() -> None:
    profile = model(precision="bf16")
    costs = profile.costs("gpu", 1, 2, recompute=True, zero_shards=2)
    np.testing.assert_allclose(costs.state_bytes, [550, 500, 600])
    np.testing.assert_allclose(costs.activation_bytes, [10, 10, 212])
