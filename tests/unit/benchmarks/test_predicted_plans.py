"""Predictions of plans that others measured: by hand for small tables, and errors for published plans."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks.planner.predicted_plans import load_measured_plans, predict
from benchmarks.planner.published_clusters import read_published
from benchmarks.planner.sailor_tables import import_bandwidths, read_gpu_tables
from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from tests.support.gpu_tables import REAL_TABLES

real = pytest.mark.skipif(not REAL_TABLES.exists(), reason="needs the published tables")
RESERVE = GPUS["GH-96"].memory_reserve_bytes
UPDATE = 0.028 * 1500 / 1400
"""Seconds of the optimizer's step of the whole model at degree 1."""


def _plan(tables: Path, stages: list[tuple[list[int], list[int]]], nodes: int, global_batch: int) -> None:
    """A file with one plan on GH-96: by stage its layers and, by replica, the tensor-parallel degree."""
    plan = {
        "name": "P",
        "model": "tiny",
        "nodes": nodes,
        "micro_batch": 1,
        "global_batch": global_batch,
        "stages": [
            {"layers": layers, "replicas": [{"gpu": "GH-96", "tensor_parallel": degree} for degree in degrees]}
            for layers, degrees in stages
        ],
        "measured_iteration_seconds": 1.0,
        "measured_gradient_reduction_seconds": 0.1,
        "measured_max_memory_bytes": 10**9,
    }
    (tables / "measured_iterations.json").write_text(json.dumps([plan]))


def test_the_time_of_one_stage(tables: Path) -> None:
    _plan(tables, [([0, 5], [1, 1])], nodes=2, global_batch=8)
    (plan,) = load_measured_plans(tables)
    assert (plan.replicas, plan.micro_batches) == (2, 4)
    predicted = predict(plan, read_gpu_tables(tables, "tiny").profile, import_bandwidths(tables))
    assert predicted.pipeline.seconds == pytest.approx(4 * 5 * 0.03 + 3 * 3 / 7 * UPDATE + UPDATE)
    # 1,500 bytes over two replicas: two messages of 750 bytes.
    channel = import_bandwidths(tables)["GH-96"].between[1]
    assert predicted.gradient_seconds == pytest.approx(2 * channel.seconds(750))
    # 24 bytes per parameter of 4; activations of 30 bytes per layer, and twice a layer's in backward.
    assert predicted.memory_bytes == pytest.approx(6 * 1500 + 5 * 30 + 2 * 30 + RESERVE)


def test_two_stages_send_parts_and_gather_them(tables: Path) -> None:
    _plan(tables, [([0, 3], [2]), ([3, 5], [2])], nodes=2, global_batch=1)
    (plan,) = load_measured_plans(tables)
    profile, channels = read_gpu_tables(tables, "tiny").profile, import_bandwidths(tables)
    assert plan.bounds(profile) == (0, 2, 3)
    predicted = predict(plan, profile, channels)
    # 4 MB in two parts of 2 MB (x = 1) at 2 + 4 GB/s together; then each rank receives the other part inside its node.
    hop = 4e6 / 6e9 + 2e6 / 100e9
    assert predicted.pipeline.hop_seconds == pytest.approx((hop,))
    assert predicted.gradient_seconds == 0


def test_messages_in_both_directions_take_turns(tables: Path) -> None:
    """In steady state the longer stage sends and receives once each per micro-batch, one after the other."""
    _plan(tables, [([0, 3], [2]), ([3, 5], [2])], nodes=2, global_batch=6)
    (plan,) = load_measured_plans(tables)
    predicted = predict(plan, read_gpu_tables(tables, "tiny").profile, import_bandwidths(tables))
    cost = predicted.pipeline
    (hop,) = cost.hop_seconds
    first, second = (f + b for f, b in zip(cost.forward_seconds, cost.backward_seconds, strict=True))
    assert first > second
    assert cost.seconds == pytest.approx(first + second + 2 * hop + 5 * (first + 2 * hop) + max(cost.update_seconds))


def test_replicas_with_unequal_degrees(tables: Path) -> None:
    """A replica with one rank per stage beside one with two: the slower one counts, and each rank of a replica reduces
    its own share of the gradients."""
    _plan(tables, [([0, 3], [1, 2]), ([3, 5], [1, 2])], nodes=4, global_batch=8)
    (plan,) = load_measured_plans(tables)
    predicted = predict(plan, read_gpu_tables(tables, "tiny").profile, import_bandwidths(tables))
    channel = import_bandwidths(tables)["GH-96"]
    slow, fast = predicted.pipelines
    assert predicted.pipeline is slow and slow.seconds > 1.5 * fast.seconds
    # The hop of each replica: between nodes, undivided for the first, in two parts for the second.
    assert slow.hop_seconds == pytest.approx((channel.between[1].seconds(4e6),))
    assert fast.hop_seconds == pytest.approx((2 * channel.between[2].seconds(2e6) + channel.inside[2].seconds(2e6),))
    # Stage 0 has 900 bytes. Its ring has two steps, in which the first replica's rank sends 450 bytes.
    first, second = channel.between[1].seconds(450), 2 * channel.between[2].seconds(225)
    assert predicted.gradient_seconds == pytest.approx(2 * max(first, second))


def test_stages_in_one_node_send_inside_it(tables: Path) -> None:
    _plan(tables, [([0, 3], [1]), ([3, 5], [1])], nodes=1, global_batch=4)
    (plan,) = load_measured_plans(tables)
    predicted = predict(plan, read_gpu_tables(tables, "tiny").profile, import_bandwidths(tables))
    assert predicted.pipeline.hop_seconds == pytest.approx((4e6 / 100e9,))


def test_ranks_of_a_node_share_its_bandwidth(tables: Path) -> None:
    """Two replicas in each of two nodes: the hops of both pass the network at once."""
    _plan(tables, [([0, 3], [1, 1]), ([3, 5], [1, 1])], nodes=2, global_batch=4)
    (plan,) = load_measured_plans(tables)
    predicted = predict(plan, read_gpu_tables(tables, "tiny").profile, import_bandwidths(tables))
    channel = import_bandwidths(tables)["GH-96"]
    for cost in predicted.pipelines:
        assert cost.hop_seconds == pytest.approx((2 * channel.between[2].seconds(4e6),))
    # Rings stay inside the nodes.
    assert predicted.gradient_seconds == pytest.approx(2 * channel.inside[2].seconds(450))


@real
def test_published_plans_are_predicted() -> None:
    """In N4_D4 the times contradict each other. In N8_D2 of GPT-NEO the stages are those of N4_D1 with four times the
    micro-batch, but memory grew by less than half of three times the activations that stages must hold."""
    profiles, channels, _ = read_published(REAL_TABLES)
    models = {profile.name: profile for profile in profiles}
    plans = load_measured_plans(REAL_TABLES)
    assert len(plans) == 12
    predictions = {plan.name: predict(plan, models[plan.model], channels) for plan in plans}
    times = [
        abs(predictions[plan.name].iteration_seconds / plan.iteration_seconds - 1)
        for plan in plans
        if plan.name != "OPT-350/N4/N4_D4"
    ]
    assert median(times) <= 0.055 and mean(times) <= 0.09 and max(times) < 0.4
    memory = [
        predictions[plan.name].memory_bytes / plan.memory_bytes - 1 for plan in plans if plan.name != "GPT-NEO/N8/N8_D2"
    ]
    assert min(memory) >= -0.05 and max(memory) <= 0.10
