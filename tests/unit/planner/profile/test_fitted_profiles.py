"""Profiles for other machines: estimated times contain what the cluster's links take; further kinds of device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile
from colossal_hetero.planner.profile.fitted_profiles import on_links, with_kind
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from tests.support.layer_profiles import layer_times, times_of
from tests.support.machines import Nodes, machines
from tests.support.planning import make_plans

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


def test_slow_links_lead_to_less_tensor_parallelism() -> None:
    profile = estimated_profile(MODEL, [KIND], micro_batches=[1], tensor_parallel=[1, 2, 4, 8])
    best = [
        make_plans(topology(rate), profile, global_batch=8, keep=1, tensor_parallel=[8])[0].plan.iteration_seconds
        for rate in (300, 12, 1)
    ]
    assert best[0] < best[1] < best[2]
    # About 0.65 s of products; sums of 96 times 8 MiB, and two more, over 8 devices at 12 GB/s, for 8 samples.
    assert best[1] - best[0] == pytest.approx(8 * 98 * 2 * 7 / 8 * 2**23 * (1 / 12e9 - 1 / 300e9), rel=0.01)
    free = [make_plans(topology(rate), profile, global_batch=8, keep=1)[0].plan for rate in (300, 1)]
    assert free[1].tensor_parallel < free[0].tensor_parallel


def profile(*kinds: str, layers: int = 4, micro_batch: int = 2, precision: str = "fp32") -> ModelProfile:
    """A model whose layers take as many seconds as the name of the kind has letters."""
    sizes = LayerSizes(parameter_bytes=(8,) * layers, activation_bytes=(4,) * layers, output_bytes=(2,) * layers)
    times = tuple(layer_times(kind, (float(len(kind)),) * layers, micro_batch=micro_batch) for kind in kinds)
    return ModelProfile(
        name="model",
        precision=precision,
        times=times,
        sizes=(sizes,),
        rank_devices=kinds,
        context_bytes={kind: len(kind) for kind in kinds},
    )


def test_the_measured_kind_has_the_name_of_the_cluster_file() -> None:
    before = profile("one", "other")
    after = with_kind(before, "new", profile("measured"))
    assert after.devices == ("one", "other", "new")
    assert times_of(after, "new", 1, 2).forward_seconds == (8.0,) * 4
    assert after.context_bytes == {"one": 3, "other": 5, "new": 8}
    assert after.costs("new", 1, 2).forward_seconds.sum() == pytest.approx(32.0)
    assert before.devices == ("one", "other")
    # What it says is a valid file.
    assert ModelProfile.model_validate_json(after.model_dump_json(by_alias=True)) == after


@pytest.mark.parametrize(
    ("kind", "measured", "message"),
    [
        ("one", profile("measured"), "has times of one already"),
        ("new", profile("measured", layers=5), "layers 5 instead of 4"),
        ("new", profile("measured", precision="bf16"), "precision bf16 instead of fp32"),
        ("new", profile("measured", micro_batch=3), "micro-batches of 3 were measured on new, but the profile has 2"),
        ("new", profile("a", "b"), "times of a, b were measured for new"),
    ],
)
def test_what_does_not_belong_together(kind: str, measured: ModelProfile, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_kind(profile("one"), kind, measured)
