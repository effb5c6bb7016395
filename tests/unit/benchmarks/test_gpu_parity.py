"""The parity of the GPU suite: what counts as the worst result."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu.layers.parity import Distances, largest_distance, mean_distance

EXACT = {"y": torch.tensor([1.0, -4.0], dtype=torch.float64), "dx": torch.tensor([2.0, 1.0], dtype=torch.float64)}
OFF = {"y": torch.tensor([1.0, -3.9]), "dx": torch.tensor([2.0, 1.5])}
OF_DENSE = {"y": 0.01, "dx": 0.5}


def test_distances_are_relative() -> None:
    assert largest_distance(OFF["y"], EXACT["y"]) == pytest.approx(0.1 / 4)
    assert mean_distance(OFF["y"], EXACT["y"]) == pytest.approx(0.1 / 17**0.5)


def test_half_precision_is_compared_with_the_dense_layer() -> None:
    single, half = Distances.in_precision(torch.float32), Distances.in_precision(torch.bfloat16)
    for found in (single, half):
        found.add("idle", "layer", OFF, EXACT, OF_DENSE)
    assert single.worst["idle"] == (pytest.approx(0.25), "layer, dx")
    assert half.worst["idle"] == (pytest.approx(10 / 17**0.5), "layer, y")


def test_a_result_that_is_not_a_number_is_the_worst() -> None:
    found, other = Distances(is_ratio=False), Distances(is_ratio=False)
    found.add("idle", "broken", {"y": torch.tensor([math.nan, 1.0])}, {"y": EXACT["y"]}, OF_DENSE)
    other.add("idle", "layer", OFF, EXACT, OF_DENSE)
    found.merge(other)
    other.merge(found)
    assert {each.worst["idle"][1] for each in (found, other)} == {"broken, y"}
