"""Estimated times of tensor parallelism contain what the cluster's own links take."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.estimate import Transformer, estimated_profile
from colossal_hetero.planner.profile.fitted_profiles import on_links
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
