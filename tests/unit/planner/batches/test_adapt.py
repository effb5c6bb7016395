"""ADAPT: ring orders compared with all permutations, the devices that are dropped, and links of a cluster file."""

from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner import Curve, allocate
from colossal_hetero.planner.batches import adapt as adapt_module
from colossal_hetero.planner.batches.adapt import (
    EXACT_DEVICES,
    AdaptPlan,
    RingNetwork,
    ring_cost,
    ring_order,
    with_cluster_links,
)
from colossal_hetero.planner.batches.batch_profile import load_profile, save_profile
from colossal_hetero.planner.cluster.cluster_file import save_cluster
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, MeasuredLink
from colossal_hetero.planner.report.batch_report import compare
from tests.support.batch_profiles import device, profile
from tests.support.command_line import failure, run
from tests.support.machines import of_nodes
from tests.support.random_examples import examples

GPU, CPU = ("nccl", "gloo"), ("gloo",)


def link(ranks: tuple[int, int], protocol: str, latency: float, bytes_per_second: float = 1e30) -> MeasuredLink:
    return MeasuredLink(ranks=ranks, protocol=protocol, latency_seconds=latency, bytes_per_second=bytes_per_second)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    count = draw(st.integers(1, 7))
    edge = draw(st.sampled_from([st.floats(0.01, 10), st.integers(1, 4).map(float)]))
    seconds = np.array(draw(st.lists(edge, min_size=count * count, max_size=count * count))).reshape(count, count)
    return np.minimum(seconds, seconds.T) if draw(st.booleans()) else seconds


@examples(ordinary=50, thorough=300)
@given(matrices())
def test_no_ring_is_better(seconds: np.ndarray) -> None:
    count = len(seconds)
    ring = ring_order(seconds)
    assert ring[0] == 0 and sorted(ring) == list(range(count))
    every = [(0, *rest) for rest in permutations(range(1, count))]
    longest = min(ring_cost(seconds, each)[0] for each in every)
    assert ring_cost(seconds, ring)[0] == longest
    total = min(ring_cost(seconds, each)[1] for each in every if ring_cost(seconds, each)[0] == longest)
    assert ring_cost(seconds, ring)[1] == pytest.approx(total)


@pytest.mark.parametrize("count", [EXACT_DEVICES + 1, 40])
def test_a_hidden_ring_is_found(count: int) -> None:
    """One ring has short edges and all other edges are long. There are too many devices to try all permutations."""
    random = np.random.default_rng(count)
    hidden = random.permutation(count)
    seconds = random.uniform(2.0, 3.0, (count, count))
    seconds[hidden, np.roll(hidden, -1)] = random.uniform(0.5, 1.0, count)
    ring = ring_order(np.minimum(seconds, seconds.T))
    assert ring_cost(np.minimum(seconds, seconds.T), ring)[0] <= 1.0
    assert sorted(ring) == list(range(count)) and ring[0] == 0


def test_the_protocol_and_the_links_of_a_ring() -> None:
    """One CPU makes all use Gloo; a link counts both ways, unless the opposite way has its own."""
    links = [
        *(link((0, 2), "gloo", 1.0, 10.0), link((2, 5), "gloo", 2.0, 10.0), link((5, 2), "gloo", 3.0, 10.0)),
        *(link((0, 5), "gloo", 0.0, 100.0), link((0, 2), "nccl", 0.1, 1000.0)),
    ]
    gloo, nccl = (RingNetwork(links, [[protocol]] * 6, 100.0) for protocol in ("gloo", "nccl"))
    np.testing.assert_allclose(gloo.seconds([0, 2, 5]), [[0, 11, 1], [11, 0, 12], [1, 13, 0]])
    assert nccl.seconds([2, 0])[0, 1] == pytest.approx(0.2)
    mixed = RingNetwork([], [GPU, GPU, CPU], 0.0)
    assert mixed.protocol([0, 1]) == "nccl" and mixed.protocol([0, 1, 2]) == "gloo"


def adapt(curves: list[Curve], samples: int, stage: int, **network: Any) -> AdaptPlan:
    return adapt_module.adapt(lambda ranks: curves, samples, stage, RingNetwork(**{"message_bytes": 0, **network}))


def straight(seconds: float, most: int = 16) -> Curve:
    return Curve.from_seconds([seconds * b for b in range(1, most + 1)])


def mesh(count: int, gloo: float, nccl: float | None = None, only: tuple[int, ...] = ()) -> list[MeasuredLink]:
    """Links that take ``gloo`` or ``nccl`` seconds for any message; ``only`` limits the NCCL links to some devices."""
    found = [link(pair, "gloo", gloo) for pair in combinations(range(count), 2)]
    if nccl is not None:
        found += [link(pair, "nccl", nccl) for pair in combinations(only or range(count), 2)]
    return found


def test_two_cpus_are_dropped_together() -> None:
    """If only one of them is dropped, the others still use Gloo and compute longer."""
    curves = [straight(1.0), straight(1.0), straight(2.0), straight(2.0)]
    links = mesh(4, 3.0, 0.1, only=(0, 1))
    plan = adapt(curves, 12, 0, links=links, protocols=[GPU, GPU, CPU, CPU])
    assert plan.dropped == (2, 3) and plan.protocol == "nccl" and plan.cost_seconds == pytest.approx(6.1)
    assert any("use nccl instead of gloo" in step.reason and step.kept for step in plan.steps)


def test_one_device_may_remain_and_one_that_holds_nothing_is_dropped_first() -> None:
    plan = adapt([straight(1.0), straight(50.0)], 4, 2, links=mesh(2, 9.0), protocols=[CPU] * 2)
    assert plan.ring == (0,) and plan.dropped == (1,) and plan.cost_seconds == 4.0
    alone = adapt([straight(1.0)], 4, 2, links=[], protocols=[CPU])
    assert alone.ring == (0,) and alone.cost_seconds == 4.0 and len(alone.steps) == 1
    curves = [straight(1.0), straight(1.0).limited(0), straight(1.0)]
    plan = adapt(curves, 4, 0, links=mesh(3, 0.1), protocols=[CPU] * 3)
    assert plan.dropped == (1,) and plan.steps[0].reason == "cannot hold one sample: rank 1"


@examples(ordinary=25, thorough=60)
@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from([0, 3]),
    st.floats(0, 10),
    st.floats(0.01, 1),
    st.randoms(use_true_random=False),
)
def test_costs_are_those_of_the_best_ring_and_batches(devices, samples, stage, gloo, faster, random):
    """The cost is that of the best ring among all permutations of the kept devices. It is at most the cost of all
    devices and at least the cost of the best subset."""
    curves = [straight(seconds, 6) for seconds, _ in devices]
    protocols = [GPU if is_gpu else CPU for _, is_gpu in devices]
    hop = {pair: gloo * random.random() for pair in combinations(range(len(devices)), 2)}
    links = [link(p, "gloo", s) for p, s in hop.items()] + [link(p, "nccl", s * faster) for p, s in hop.items()]

    def cost(ranks: tuple[int, ...]) -> float:
        scale = faster if all(protocols[rank] == GPU for rank in ranks) else 1.0
        edge = min(
            max((scale * hop[min(a, b), max(a, b)] for a, b in zip(r, r[1:] + r[:1], strict=True) if a != b), default=0)
            for r in permutations(ranks)
        )
        return allocate([curves[rank] for rank in ranks], samples, stage, communication_seconds=edge).wall_seconds

    everyone = tuple(range(len(devices)))
    plan = adapt(curves, samples, stage, links=links, protocols=protocols)
    assert plan.cost_seconds == pytest.approx(cost(tuple(sorted(plan.ring))))
    assert sorted(plan.ring + plan.dropped) == list(everyone)
    assert (
        plan.steps[0].cost_seconds == pytest.approx(cost(everyone)) and plan.cost_seconds <= plan.steps[0].cost_seconds
    )
    subsets = [each for count in range(1, len(everyone) + 1) for each in combinations(everyone, count)]
    assert plan.cost_seconds >= min(map(cost, subsets)) * (1 - 1e-9)
    kept = [step.cost_seconds for step in plan.steps if step.kept]
    assert kept == sorted(kept, reverse=True) and kept[-1] == plan.cost_seconds


def nics(**rates: float) -> tuple[Channel, ...]:
    return tuple(Channel(kind, rate, 2e-6 if kind == "InfiniBand" else 3e-5) for kind, rate in rates.items())


TOPOLOGY = of_nodes(
    [
        ([GPUS["A100-40"]] * 2, Channel("NVLink", 3e11, 5e-6), nics(InfiniBand=2e10, Ethernet=3e9)),
        ([GPUS["V100-16"]], Channel("NVLink", 1.5e11), nics(InfiniBand=1e10, Ethernet=1e9)),
        ([DeviceKind("host", 10**11, 1e12)], Channel("local", 9e9), nics(Ethernet=2e9)),
    ]
)


def four_devices(**changes: object):
    kinds = [device("A100", protocols=GPU), device("V100", protocols=GPU), device("cpu", protocols=CPU)]
    return profile(**{"kinds": kinds, "ranks": [0, 0, 1, 2], "links": (), **changes})


def test_each_pair_has_a_link_in_each_common_protocol() -> None:
    links = with_cluster_links(four_devices(), TOPOLOGY).links
    found = {(*link.ranks, link.protocol): (link.bytes_per_second, link.latency_seconds) for link in links}
    ethernet = pytest.approx(30e-6)
    assert found == {
        (0, 1, "nccl"): (3e11, pytest.approx(5e-6)),
        (0, 1, "gloo"): (3e11, pytest.approx(5e-6)),
        (0, 2, "nccl"): (1e10, pytest.approx(2e-6)),
        (1, 2, "nccl"): (1e10, pytest.approx(2e-6)),
        (0, 2, "gloo"): (1e9, ethernet),
        (1, 2, "gloo"): (1e9, ethernet),
        (0, 3, "gloo"): (2e9, ethernet),
        (1, 3, "gloo"): (2e9, ethernet),
        (2, 3, "gloo"): (1e9, ethernet),
    }


def test_the_command_drops_devices_by_the_links_of_a_cluster_file(tmp_path: Path) -> None:
    """A CPU that makes all use slow Ethernet is dropped; the same profile with these links gives the same."""
    batches, cluster, out = tmp_path / "profile.json", tmp_path / "cluster.toml", tmp_path / "out.json"
    fast = [{"batch": 1, "seconds": 10.0}, {"batch": 4, "seconds": 25.0}]
    slow = [{"batch": 1, "seconds": 900.0}, {"batch": 4, "seconds": 3600.0}]
    kinds = [
        *(device(name, protocols=GPU, points=fast) for name in ("A100", "V100")),
        device("cpu", protocols=CPU, points=slow),
    ]
    save_profile(four_devices(kinds=kinds, communication_seconds=0.0), batches)
    save_cluster(TOPOLOGY, cluster)
    result = run("batches", batches, "--global-batch", 16, "--method", "adapt", "--cluster", cluster, "--out", out)
    assert result.exit_code == 0, result.output
    expected = compare(with_cluster_links(load_profile(batches), TOPOLOGY), 16, method="adapt").adapt
    assert expected is not None and expected.dropped == (3,) and expected.protocol == "nccl"
    assert "dropped" in result.output and '"dropped": [3]' in out.read_text()
    assert "no such file" in failure("batches", batches, "--global-batch", 16, "--cluster", tmp_path / "none.toml")
