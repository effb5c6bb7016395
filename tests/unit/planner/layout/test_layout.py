"""Layouts compared with Holmes' definition and, for small clusters, with all divisions into stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colossal_hetero.planner.cluster.topology import Channel, Topology
from colossal_hetero.planner.layout.layout import Layout, naive_layout
from colossal_hetero.planner.layout.layout_costs import LayoutCosts, layout_costs
from colossal_hetero.planner.layout.nic_layout import nic_layout
from tests.support.machines import Nodes, machines
from tests.support.random_examples import examples

GIGABIT = 1e9 / 8


def as_launched(
    topology: Topology, tp: int, pp: int, dp: int, gradient_bytes: float, activation_bytes: float, micro_batches: int
) -> list[tuple[Layout, LayoutCosts]]:
    """Colossal-AI's two orders of ranks and their costs, without orders that need a missing link."""
    found = []
    for dp_outside in (True, False):
        layout = naive_layout(topology, tp, pp, dp, dp_outside)
        try:
            found.append((layout, layout_costs(topology, layout, gradient_bytes, activation_bytes, micro_batches)))
        except ValueError:
            continue
    return found


@st.composite
def shapes(draw: st.DrawFn, max_nodes: int = 3, sizes: tuple[int, ...] = (1, 2, 3, 4, 8)) -> list[Nodes]:
    """One to three clusters of nodes that differ in size."""
    clusters = draw(st.integers(1, 3))
    return [
        Nodes(
            draw(st.sampled_from(["InfiniBand", "RoCE", "Ethernet"])),
            draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=max_nodes)),
        )
        for _ in range(clusters)
    ]


@examples(ordinary=50, thorough=300)
@given(shapes(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 8))
def test_layouts_follow_the_definition_where_possible(shape: list[Nodes], tp: int, pp: int, dp: int) -> None:
    topology = machines(*shape)
    groups = [sum(size // tp for size in nodes.sizes) for nodes in shape]
    assume(sum(groups) >= pp * dp and tp * pp * dp <= len(topology.devices))
    layout = nic_layout(topology, tp, pp, dp)
    assert (layout.data_parallel, layout.pipeline, layout.tensor_parallel) == (dp, pp, tp)
    assert len(set(layout.devices)) == tp * pp * dp
    node = [device.node for device in topology.devices]
    cluster = [device.cluster for device in topology.devices]
    assert all(len({node[device] for device in group}) == 1 for group in layout.tensor_groups)
    across = [len({cluster[device] for device in group}) > 1 for group in layout.data_groups]
    # A stage needs dp groups of one cluster; if no cluster has enough groups, the stage spans several clusters.
    missing = max(0, pp - sum(count // dp for count in groups))
    assert sum(across) == missing * tp
    assert [violation.rule for violation in layout.verify(topology)] == ["data"] * (missing * tp)


@examples(ordinary=40, thorough=200)
@given(shapes(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_naive_layouts_use_the_rank_orders_of_colossalai(
    shape: list[Nodes], tp: int, pp: int, dp: int, outside: bool
) -> None:
    topology = machines(*shape)
    assume(tp * pp * dp <= len(topology.devices))
    layout = naive_layout(topology, tp, pp, dp, dp_outside=outside)
    expected = 0
    outer, inner = (dp, pp) if outside else (pp, dp)
    for first in range(outer):
        for second in range(inner):
            d, p = (first, second) if outside else (second, first)
            for t in range(tp):
                assert layout.ranks[d][p][t] == expected
                expected += 1


def assignments(devices: Sequence[int], pipeline: int, replicas: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to give ``replicas`` devices to each stage."""
    if pipeline == 0:
        yield ()
        return
    for chosen in combinations(devices, replicas):
        rest = [device for device in devices if device not in chosen]
        for others in assignments(rest, pipeline - 1, replicas):
            yield (chosen, *others)


@examples(ordinary=30, thorough=60)
@given(shapes(max_nodes=2, sizes=(1, 2, 3)), st.integers(1, 3), st.integers(1, 3))
def test_no_layout_has_fewer_violations_or_equally_many_and_a_shorter_time(
    shape: list[Nodes], pp: int, dp: int
) -> None:
    topology = machines(*shape)
    assume(pp * dp <= len(topology.devices) <= 7)

    def rank(layout: Layout) -> tuple[int, float]:
        return len(layout.verify(topology)), layout_costs(topology, layout, 1e9, 0.0, 8).seconds

    all_layouts = [
        Layout(tuple(tuple((device,) for device in replica) for replica in zip(*stages, strict=True)))
        for stages in assignments(range(len(topology.devices)), pp, dp)
    ]
    violations, seconds = min(rank(layout) for layout in all_layouts)
    found = rank(nic_layout(topology, 1, pp, dp, gradient_bytes=1e9, activation_bytes=0.0))
    assert found[0] == violations
    assert found[1] <= seconds * (1 + 1e-9)


@examples(ordinary=50, thorough=100)
@given(shapes(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.floats(0.01, 1000))
def test_no_launch_order_is_better(shape: list[Nodes], tp: int, pp: int, dp: int, megabytes: float) -> None:
    topology = machines(*shape)
    assume(sum(size // tp for nodes in shape for size in nodes.sizes) >= pp * dp)
    ours = nic_layout(topology, tp, pp, dp, gradient_bytes=1e9, activation_bytes=megabytes * 1e6, micro_batches=4)
    costs = layout_costs(topology, ours, 1e9, megabytes * 1e6, 4)
    for other, other_costs in as_launched(topology, tp, pp, dp, 1e9, megabytes * 1e6, 4):
        violations = other.verify(topology)
        splits_tensor_groups = any(violation.rule == "tensor" for violation in violations)
        if len(violations) <= len(ours.verify(topology)) and not splits_tensor_groups:
            assert costs.seconds <= other_costs.seconds * (1 + 1e-9)


def test_holmes_example() -> None:
    """The case of Figure 3: two clusters of two nodes; each cluster is a stage, each node a tensor-parallel group."""
    topology = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2, 2]))
    layout = nic_layout(topology, 2, 2, 2)
    assert layout.ranks == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert layout.data_groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.pipeline_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert not layout.verify(topology)
    naive = naive_layout(topology, 2, 2, 2)
    assert naive.data_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    texts = [violation.text for violation in naive.verify(topology)]
    assert texts[0] == (
        "data-parallel group (0, 4) of stage 0 spans clusters (1 in cluster-0, 1 in cluster-1) and runs over "
        "Ethernet (25 Gbit/s)"
    )


def test_costs_of_the_nic_layout_and_the_launch_order() -> None:
    """In launch order, gradients use Ethernet of 25 Gbit/s instead of a network of 200 Gbit/s. Both layouts have one
    ring per NIC and rings of equal length, so the launch order takes eight times as long."""
    topology = machines(Nodes("InfiniBand", [1, 1]), Nodes("RoCE", [1, 1]), latency_seconds=0.0)
    ours = nic_layout(topology, 1, 2, 2, gradient_bytes=1e9, activation_bytes=1e6, micro_batches=4)
    costs = layout_costs(topology, ours, 1e9, 1e6, 4)
    (launched, launched_costs), (stages_first, _) = as_launched(topology, 1, 2, 2, 1e9, 1e6, 4)
    assert costs.gradients_seconds == pytest.approx(1e9 / (200 * GIGABIT))
    assert launched_costs.gradients_seconds == pytest.approx(8 * costs.gradients_seconds)
    assert costs.pipeline_seconds == pytest.approx((2 + 3) * 1e6 / (25 * GIGABIT))
    assert stages_first == ours and not ours.verify(topology)
    assert [violation.rule for violation in launched.verify(topology)] == ["data", "data"]


def test_stages_span_clusters_only_where_they_must() -> None:
    topology = machines(Nodes("InfiniBand", [8, 8]), Nodes("RoCE", [8]))
    layout = nic_layout(topology, 4, 2, 3)
    assert [violation.rule for violation in layout.verify(topology)] == ["data"] * 4
    assert "(1 in cluster-0, 2 in cluster-1)" in layout.verify(topology)[0].text
    assert not nic_layout(topology, 4, 3, 2).verify(topology)


def test_heavy_activations_keep_pipelines_inside_nodes() -> None:
    """In one cluster, replicas or stages may share a node; which is faster depends on the number of bytes."""
    topology = machines(Nodes("InfiniBand", [2, 2]))
    assert nic_layout(topology, 1, 2, 2).data_groups == ((0, 1), (2, 3))
    assert nic_layout(topology, 1, 2, 2, gradient_bytes=1e6, activation_bytes=1e9).data_groups == ((0, 2), (1, 3))


def test_a_cluster_of_two_kinds_of_nic_is_two_networks() -> None:
    """InfiniBand and RoCE cannot communicate with each other (Holmes, 2.2), so a data-parallel group of both uses
    Ethernet, although it stays in its cluster."""
    topology = machines(Nodes("InfiniBand", [2, 2]), Nodes("RoCE", [2, 2]), one_cluster=True)
    assert not nic_layout(topology, 2, 2, 2).verify(topology)
    violations = naive_layout(topology, 2, 2, 2).verify(topology)
    assert [violation.rule for violation in violations] == ["network"] * 4
    assert "over Ethernet between node-0 and node-2, though they have InfiniBand and RoCE" in violations[0].text


def test_stages_stay_inside_nodes_if_devices_can_be_left_out() -> None:
    """Two nodes of three devices, two stages of two: one device per node stays unused, and no stage spans nodes."""
    layout = nic_layout(machines(Nodes("InfiniBand", [3, 3])), 1, 2, 2)
    assert layout.data_groups == ((0, 1), (3, 4))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ((0, 1, 1), "tensor_parallel=0"),
        ((2, 2, 2), "needs 8 devices, but there are 6"),
        ((2, 3, 1), r"hold 2 \(2 nodes of 3 devices: 1 each\)"),
        ((4, 1, 1), "hold 0"),
    ],
)
def test_degrees_that_do_not_fit(degrees: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nic_layout(machines(Nodes("InfiniBand", [3, 3])), *degrees)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((), "one shape"),
        ((((0,),), ((1,), (2,))), "one shape"),
        ((((0, 1), (2,)),), "one shape"),
        ((((0,), (0,)),), "device 0 has more than one place"),
    ],
)
def test_invalid_layouts_are_rejected(ranks: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout(ranks)


def test_invalid_arguments_of_costs_are_rejected() -> None:
    topology = machines(Nodes("InfiniBand", [2, 2]))
    layout = nic_layout(topology, 1, 2, 2)
    with pytest.raises(ValueError, match="gradient_bytes_per_stage has 3 values for 2 stages"):
        layout_costs(topology, layout, [1, 2, 3], 1, 1)
    with pytest.raises(ValueError, match="micro_batches=0"):
        layout_costs(topology, layout, 1, 1, 0)


def test_clusters_in_a_chain() -> None:
    """Without Ethernet, the second and the third cluster reach only the first. Stages must follow that chain; the
    launch orders would need the missing link and are left out."""
    topology = machines(Nodes("RoCE", [2]), Nodes("RoCE", [2]), Nodes("RoCE", [2]))
    nodes = tuple(dataclasses.replace(node, nics=node.nics[:1]) for node in topology.nodes)
    link = Channel("fibre", GIGABIT)
    chain = dataclasses.replace(topology, nodes=nodes, between=((0, 1, link), (0, 2, link)))
    layout = nic_layout(chain, 1, 3, 2)
    assert layout.data_groups[1] == (0, 1) and not layout.verify(chain)
    assert not as_launched(chain, 1, 3, 2, 1e9, 1e6, 4)
    with pytest.raises(ValueError, match="no link between"):
        nic_layout(dataclasses.replace(chain, between=()), 1, 3, 2)


def test_four_thousand_devices() -> None:
    topology = machines(*[Nodes("InfiniBand", [8] * 128)] * 4)
    layout = nic_layout(topology, 8, 8, 64)
    assert len(set(layout.devices)) == 4096 and not layout.verify(topology)
