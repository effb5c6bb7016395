"""Estimated profiles compared with Holmes' equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import DeviceKind
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile

MODEL = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)
KINDS = [GPUS["A100-40"], GPUS["V100-16"]]


def test_time_is_flop_over_flops() -> None:
    profile = estimated_profile(MODEL, KINDS, efficiency=0.5, micro_batches=[4, 1])
    assert profile.devices == ("A100-40", "V100-16")
    assert profile.micro_batches("A100-40", 1) == (1, 4)
    assert profile.blocks == 30
    # Holmes, Eq. 6, of which blocks are recomputed for a quarter.
    flop = MODEL.flop_per_iteration(4) - 4 * 30 * MODEL.block_forward_flop
    costs = profile.costs("A100-40", 1, 4)
    seconds = costs.forward_seconds.sum() + costs.backward_seconds.sum()
    assert seconds == pytest.approx(flop / (312e12 * 0.5), rel=1e-9)
    slow = profile.costs("V100-16", 1, 4)
    np.testing.assert_allclose(slow.forward_seconds / costs.forward_seconds, 312 / 125)


def test_memory_is_eighteen_bytes_per_parameter() -> None:
    profile = estimated_profile(MODEL, KINDS, tensor_parallel=[1, 4])
    # Holmes: 3.6 B parameters; the head holds a second copy of the embedding.
    held = MODEL.parameters + 51200 * 3072
    assert profile.costs("A100-40", 1, 1).state_bytes.sum() == pytest.approx(18 * held)
    assert MODEL.parameters == pytest.approx(3.6e9, rel=0.02)
    assert profile.costs("A100-40", 4, 1).state_bytes.sum() == pytest.approx(4.5 * held)
    assert profile.tensor_parallel_degrees("A100-40") == (1, 4)
    whole, part = profile.costs("A100-40", 1, 2), profile.costs("A100-40", 4, 2)
    np.testing.assert_allclose(part.forward_seconds, whole.forward_seconds / 4)
    assert (part.activation_bytes < whole.activation_bytes).all()
    np.testing.assert_allclose(part.output_bytes, 2 * 2 * 2048 * 3072)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"efficiency": 0.0}, r"efficiency=0\.0; the share .* above 0 and at most 1"),
        ({"efficiency": 1.5}, "efficiency=1.5"),
        ({"micro_batches": []}, r"micro_batches=\(\); give numbers of at least 1"),
        ({"tensor_parallel": [0]}, r"tensor_parallel=\(0,\)"),
        ({"tensor_parallel": [3]}, "does not divide heads=32"),
        ({"devices": []}, "no device to estimate for; name at least one kind"),
        (
            {"devices": [DeviceKind("a", 1, 1.0)] * 2},
            "times has two entries of micro-batch 1 on a at tensor_parallel 1",
        ),
    ],
)
def test_impossible_estimates(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        estimated_profile(MODEL, **{"devices": KINDS, **options})
