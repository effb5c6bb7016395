"""Estimated profiles, and the equations of a GPT: against Holmes' published numbers, and torch's counts of a block."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import DeviceKind
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile

SMALL = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)
MIDDLE = Transformer(layers=36, hidden=4096, vocabulary=51200, sequence=2048, heads=32)
LARGE = Transformer(layers=48, hidden=8192, vocabulary=51200, sequence=2048, heads=64)
KINDS = [GPUS["A100-40"], GPUS["V100-16"]]


def parameters(model: Transformer) -> int:
    return model.layers * model.block_parameters + (model.vocabulary + model.sequence) * model.hidden


def flop_per_iteration(model: Transformer, batch: int) -> int:
    """Forward, recomputation of blocks, and backward."""
    return batch * (model.layers * 4 * model.block_forward_flop + 3 * model.head_forward_flop)


def test_equations_as_printed() -> None:
    """Holmes, Eq. 5 and 6."""
    for layers, h, v, s in itertools.product((1, 12, 96), (64, 768), (1000, 51200), (128, 2048)):
        model = Transformer(layers=layers, hidden=h, vocabulary=v, sequence=s, heads=4)
        printed = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
        flop = 96 * 7 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        assert math.isclose(parameters(model), printed, rel_tol=1e-12)
        assert math.isclose(flop_per_iteration(model, 7), flop, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("model", "billions", "batch", "gpus", "tflops", "published"),
    [
        # Tables 2 to 5: InfiniBand, of group 7 only the parameters.
        (SMALL, 3.6, 768, 32, 197, 99.23),
        (SMALL, 3.6, 1536, 48, 200, 151.25),
        (MIDDLE, 7.5, 1536, 64, 189, 92.35),
        (MIDDLE, 7.5, 2688, 32, 233, 57.03),
        (MIDDLE, 7.5, 1536, 96, 95, 70.11),
        (LARGE, 39.1, 1536, 1, 1, None),
    ],
)
def test_published_sizes_and_samples_per_second(
    model: Transformer, billions: float, batch: int, gpus: int, tflops: float, published: float | None
) -> None:
    assert round(parameters(model) / 1e9, 1) == billions
    if published is not None:
        seconds = flop_per_iteration(model, batch) / (tflops * 1e12 * gpus)
        assert batch / seconds == pytest.approx(published, rel=0.02)


def test_counts_of_a_torch_block() -> None:
    """torch counts the same FLOP and parameters of a block. Its attention has no causal mask, which would save FLOP."""
    model = Transformer(layers=1, hidden=48, vocabulary=100, sequence=24, heads=4)
    block = nn.TransformerEncoderLayer(48, 4, 192, batch_first=True)
    assert sum(p.numel() for p in block.parameters()) == model.block_parameters
    x = torch.randn(3, 24, 48, requires_grad=True)
    head = nn.Linear(48, 100, bias=False)
    with FlopCounterMode(display=False) as forward:
        hidden = block(x)
    assert forward.get_total_flops() == 3 * model.block_forward_flop
    with FlopCounterMode(display=False) as last:
        logits = head(hidden)
    assert last.get_total_flops() == 3 * model.head_forward_flop
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert backward.get_total_flops() == 3 * 2 * (model.block_forward_flop + model.head_forward_flop)


def test_activation_memory() -> None:
    """Korthikanti et al. 2022: inside the attention of a layer, GPT-3 keeps 80 sbh bytes (5as/h, section 5). Without
    parallelism a layer keeps s h (34 + 5 a s/h) bytes per sample; with tensor parallelism 10 s h of these bytes remain
    on every device."""
    gpt3 = Transformer(layers=96, hidden=12288, vocabulary=51200, sequence=2048, heads=96)
    row = 2048 * 12288
    assert gpt3.block_activation_bytes() == row * (34 + 80)
    assert gpt3.block_activation_bytes(8) == row * (10 + 104 / 8)


def test_time_is_flop_over_flops() -> None:
    profile = estimated_profile(SMALL, KINDS, efficiency=0.5, micro_batches=[4, 1])
    assert profile.devices == ("A100-40", "V100-16")
    assert profile.micro_batches("A100-40", 1) == (1, 4)
    assert profile.blocks == 30
    # Holmes, Eq. 6, of which blocks are recomputed for a quarter.
    flop = flop_per_iteration(SMALL, 4) - 4 * 30 * SMALL.block_forward_flop
    costs = profile.costs("A100-40", 1, 4)
    seconds = costs.forward_seconds.sum() + costs.backward_seconds.sum()
    assert seconds == pytest.approx(flop / (312e12 * 0.5), rel=1e-9)
    slow = profile.costs("V100-16", 1, 4)
    np.testing.assert_allclose(slow.forward_seconds / costs.forward_seconds, 312 / 125)


def test_memory_is_eighteen_bytes_per_parameter() -> None:
    profile = estimated_profile(SMALL, KINDS, tensor_parallel=[1, 4])
    # Holmes: 3.6 B parameters; the head holds a second copy of the embedding.
    held = parameters(SMALL) + 51200 * 3072
    assert profile.costs("A100-40", 1, 1).state_bytes.sum() == pytest.approx(18 * held)
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
        estimated_profile(SMALL, **{"devices": KINDS, **options})
    with pytest.raises(ValueError, match="multiple of heads=3"):
        Transformer(layers=2, hidden=100, vocabulary=10, sequence=8, heads=3)
