"""Profiles of layers: files, interpolation, costs by hand; estimates against published numbers and torch."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile
from colossal_hetero.planner.profile.fitted_profiles import on_links
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile, load_profile, save_profile
from tests.support.layer_profiles import layer_times
from tests.support.machines import Nodes, machines


def times(device: str = "fast", micro_batch: int = 1, factor: float = 1.0, **fields: Any) -> dict[str, Any]:
    content = {
        "device": device,
        "micro_batch": micro_batch,
        "forward_seconds": [factor * each for each in (0.5, 1.0, 2.0, 3.0, 0.25)],
        "backward_seconds": [factor * each for each in (1.0, 2.0, 4.0, 6.0, 0.5)],
        "update_seconds": [0.1, 0.2, 0.3, 0.4, 0.5],
    }
    return {**content, **fields}


def sizes(**fields: Any) -> dict[str, Any]:
    content = {
        "parameter_bytes": [100, 10, 20, 30, 50],
        "activation_bytes": [7, 11, 13, 17, 5],
        "output_bytes": [3, 3, 4, 5, 1],
    }
    return {**content, **fields}


def profile(**fields: Any) -> ModelProfile:
    content: dict[str, Any] = {
        "name": "net",
        "times": [times(), times(micro_batch=4, factor=3.0), times("slow", factor=5.0)],
        "sizes": [sizes()],
        "rank_devices": ["fast", "slow"],
    }
    return ModelProfile.model_validate({**content, **fields})


def test_a_saved_profile_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    saved = profile()
    saved.costs("fast", 1, 2)
    save_profile(saved, path)
    assert load_profile(path) == profile() == saved
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["schema"] == 1


def test_layers_before_and_after_the_blocks_are_added_to_the_first_and_the_last_block() -> None:
    costs = profile().costs("fast", 1, 4)
    np.testing.assert_allclose(costs.forward_seconds, [4.5, 6.0, 9.75])
    np.testing.assert_allclose(costs.backward_seconds, [9.0, 12.0, 19.5])
    np.testing.assert_allclose(costs.update_seconds, [0.3, 0.3, 0.9])
    np.testing.assert_allclose(costs.state_bytes, [440, 80, 320])
    np.testing.assert_allclose(costs.gradient_bytes, [110, 20, 80])
    np.testing.assert_allclose(costs.activation_bytes, [4 * 18, 4 * 13, 4 * 22])
    np.testing.assert_allclose(costs.output_bytes, [12, 16, 20])


def test_measured_temporaries_are_used() -> None:
    """Of several blocks the largest counts, and less in the head than in a block adds nothing."""
    each = {f"{what}_seconds": [1] * 5 for what in ("forward", "backward", "update")}
    part = {f"{what}_bytes": [1, 2, 3, 2, 4] for what in ("parameter", "activation", "output")}
    mine = profile(times=[times(**each)], sizes=[sizes(**part, temporary_bytes=[90, 10, 40, 20, 35])], rank_devices=[])
    costs = mine.costs("fast", 1, 1)
    assert costs.temporary_bytes == 40 and costs.activation_bytes.tolist() == [3, 3, 6]
    assert costs.memory_for_blocks(100, 2) == 60 and costs.memory_for_blocks(30, 2) == 0
    # A single stage also has buckets, which are as large as the parameters.
    assert costs.memory_for_blocks(100, 1) == 60 - sum(part["parameter_bytes"])
    # Of those that do not grow with the micro-batch, the second block needs the most in both; the head needs 116 and
    # 134, which the last stage adds.
    measured = {"temporary_bytes": [0, 10, 4, 2, 6], "fixed_temporary_bytes": [900, 10, 100, 0, 110]}
    both = [times(**each), times(micro_batch=4, **each)]
    mine = profile(times=both, sizes=[sizes(**part, **measured)], rank_devices=[])
    one, four = (mine.costs("fast", 1, size) for size in (1, 4))
    assert one.temporary_bytes == 104 and one.activation_bytes.tolist() == [3, 3, 6 + 12]
    assert four.temporary_bytes == 116 and four.activation_bytes.tolist() == [12, 12, 24 + 18]


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.sets(st.integers(1, 12), min_size=6, max_size=6))
def test_smaller_micro_batches_never_take_longer(factors: list[float], batches: set[int]) -> None:
    measured = sorted(batches)[: len(factors)]
    mine = profile(
        times=[times(micro_batch=size, factor=factor) for size, factor in zip(measured, factors, strict=True)],
        rank_devices=[],
    )
    totals = [mine.costs("fast", 1, size).forward_seconds.sum() for size in range(measured[0], measured[-1] + 1)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(totals))
    for place, size in enumerate(measured):
        least = min(factors[place:])
        assert mine.costs("fast", 1, size).forward_seconds.sum() == pytest.approx(6.75 * least)


def model(**changes: Any) -> ModelProfile:
    """An embedding, three blocks and a head, measured with 1, 2 and 8 samples; a block takes as long as it has samples,
    backward twice as long."""
    times = tuple(
        layer_times("gpu", (0.5, *(float(size),) * 3, 0.25), micro_batch=size, update_seconds=(0.0, 6.0, 6.0, 6.0, 0.0))
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
    assert plain is profile.costs("gpu", 1, 2) and not plain.forward_seconds.flags.writeable
    both = model(precision="bf16").costs("gpu", 1, 2, recompute=True, zero_shards=2)
    np.testing.assert_allclose(both.state_bytes, [550, 500, 600])
    np.testing.assert_allclose(both.activation_bytes, [10, 10, 212])


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
    # In fp32, two moments in stage 0; with ZeRO also the copy.
    for whole in (model(state_factor=4.0), model(state_factor=5.0, master_copies=True)):
        costs = whole.costs("gpu", 1, 2, zero_shards=2)
        np.testing.assert_allclose(costs.state_bytes, [110 * (2 + 3 / 2), 100 * 3.5, 120 * 3.5])


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


SMALL = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)
KINDS = [GPUS["A100-40"], GPUS["V100-16"]]


def parameters(model: Transformer) -> int:
    return model.layers * model.block_parameters + (model.vocabulary + model.sequence) * model.hidden


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
