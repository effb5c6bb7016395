"""Estimated profiles against published numbers and torch's counts; what links take."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile
from colossal_hetero.planner.profile.fitted_profiles import on_links
from tests.support.machines import Nodes, machines

MODEL = Transformer(layers=24, hidden=2048, vocabulary=50257, sequence=2048, heads=16)
KIND = DeviceKind("RTX-3090", 24 * 10**9, 71e12)


def topology(*gigabytes: float, latency: float = 0.0, size: int = 8, shared: float | None = None) -> Topology:
    """A node of eight devices for each bandwidth."""
    made = machines(*[Nodes("Ethernet", [size]) for _ in gigabytes], one_cluster=True, device=KIND.name)
    changes = {} if shared is None else {"inside_bytes_per_second": shared * 1e9}
    nodes = [
        dataclasses.replace(node, inside=Channel("PCIe", rate * 1e9, latency), **changes)
        for node, rate in zip(made.nodes, gigabytes, strict=True)
    ]
    devices = tuple(dataclasses.replace(device, kind=KIND) for device in made.devices)
    return dataclasses.replace(made, nodes=tuple(nodes), devices=devices)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_each_block_sums_its_outputs_twice_each_way(degree: int) -> None:
    plain = estimated_profile(MODEL, [KIND], tensor_parallel=[1, degree])
    priced = on_links(plain, topology(12, latency=1e-5))
    # A ring all-reduce of one micro-batch's outputs in half precision.
    seconds = 2 * (degree - 1) * (2048 * 2048 * 2 / degree / 12e9 + 1e-5)
    before, after = plain.costs(KIND.name, degree, 1), priced.costs(KIND.name, degree, 1)
    more = after.forward_seconds - before.forward_seconds
    np.testing.assert_allclose(more, seconds * np.array([3, *[2] * 23]))  # the first block has the embedding
    more = after.backward_seconds - before.backward_seconds
    np.testing.assert_allclose(more, seconds * np.array([*[2] * 23, 3]))  # the last one has the head
    one = [each.costs(KIND.name, 1, 1).forward_seconds for each in (plain, priced)]
    np.testing.assert_array_equal(*one)
    assert on_links(priced, topology(1)) is priced  # times that contain communication stay as they are


def test_the_slowest_links_of_a_kind_count_and_groups_share_what_their_node_has() -> None:
    plain = estimated_profile(MODEL, [KIND], tensor_parallel=[2])

    def seconds(of: Topology) -> float:
        return float(on_links(plain, of).costs(KIND.name, 2, 1).forward_seconds[1])

    assert seconds(topology(300, 12)) == seconds(topology(12)) > seconds(topology(300))
    # A node with a single device has no groups.
    single = machines(Nodes("Ethernet", [1]), one_cluster=True, device=KIND.name)
    assert seconds(single) == plain.costs(KIND.name, 2, 1).forward_seconds[1]
    # Four groups of two on a bus for all.
    assert seconds(topology(12, shared=12)) > 2 * seconds(topology(12))


SMALL = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)
KINDS = [GPUS["A100-40"], GPUS["V100-16"]]


def parameters(model: Transformer) -> int:
    return model.layers * model.block_parameters + (model.vocabulary + model.sequence) * model.hidden


def test_published_size_and_samples_per_second() -> None:
    """Holmes, tables 2 to 5: forward passes, recomputation of blocks, and backward passes on 32 GPUs at 197 TFLOP/s."""
    assert round(parameters(SMALL) / 1e9, 1) == 3.6
    flop = SMALL.layers * 4 * SMALL.block_forward_flop + 3 * SMALL.head_forward_flop
    assert 197e12 * 32 / flop == pytest.approx(99.23, rel=0.02)


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


def test_with_recomputation_an_estimate_takes_the_flop_of_holmes() -> None:
    """Eq. 6: ``96 B s l h² (1 + s/(6h) + V/(16 l h))``, of which the logits run forward once."""
    model = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)
    device = DeviceKind("a", 10**12, 1e12)
    costs = estimated_profile(model, [device], efficiency=1.0, micro_batches=[4]).costs("a", 1, 4, recompute=True)
    s, h, layers, v = model.sequence, model.hidden, model.layers, model.vocabulary
    flop = 96 * 4 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    logits = 4 * model.head_forward_flop
    total = float(costs.forward_seconds.sum() + costs.backward_seconds.sum()) * 1e12
    assert total == pytest.approx(flop + logits, rel=1e-12)  # here the head is recomputed with the last block
