"""Measuring costs before training: the same on all ranks, kept on disk, and correct if files are missing or damaged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalanceConfig, Costs, pretest
from colossal_hetero.balance.plan import Traffic, Volume
from colossal_hetero.balance.pretest import FittedLink, ProductShape, fit_link, fit_receive_factor, fit_resize
from tests.support.harness import run_ranks

SHAPES = [ProductShape(96, 64), ProductShape(64, 96), ProductShape(96, 64)]
CPU = torch.device("cpu")
PREPARED = tuple[Costs, int, list[str]]


def traffic(share: float) -> Traffic:
    sent = round(share * 1e6)
    return Traffic(Volume(4, sent), Volume(2, sent), Volume(2, sent))


def prepare(group: dist.ProcessGroup, form: str = "block", **options: object) -> PREPARED:
    """The costs, the number of times that they were measured, and the texts of warnings."""
    config = BalanceConfig(mode="auto", **options)
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(pretest, "measure_costs", wraps=pretest.measure_costs) as measure,
    ):
        warnings.simplefilter("always")
        measurement = pretest.CostMeasurement(group, SHAPES, 40, torch.float32, CPU, traffic, form)
        costs = pretest.prepare_costs(config, measurement)
    return costs, measure.call_count, [str(warning.message) for warning in caught]


def measure_quickly(ranks: int) -> None:
    """Make fewer and shorter measurements, for tests that do not check the measured values."""
    assert dist.get_world_size() == ranks
    pretest.PRODUCT_SECONDS = 0.01
    pretest.MESSAGES = {2**12: 3, 2**14: 3}


def measure_both_forms(ranks: int) -> list[PREPARED]:
    measure_quickly(ranks)
    before = torch.get_rng_state()
    found = [prepare(dist.group.WORLD, form, measure_costs="") for form in ("column", "block")]
    assert torch.equal(torch.get_rng_state(), before), "measuring changed the state of the random numbers"
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_same_costs(ranks: int) -> None:
    results = run_ranks(ranks, measure_both_forms, ranks)
    for form in range(2):
        costs, measured, warned = results[0][form]
        assert measured == 1 and not warned
        assert costs.phi1(0.5) > 0 and costs.receive_factor > 0 and costs.communication_scale == 1.0
        assert all(other[form] == results[0][form] for other in results)


def prepare_again_and_again(folder: str) -> list[PREPARED]:
    measure_quickly(2)
    found = [prepare(dist.group.WORLD, measure_costs=folder) for _ in range(2)]
    found.append(prepare(dist.group.WORLD, "column", measure_costs=folder))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder).iterdir():
            path.write_text(path.read_text()[:-50])
    dist.barrier()
    found += [prepare(dist.group.WORLD, measure_costs=folder) for _ in range(2)]
    return found


def test_costs_are_measured_once(tmp_path: Path) -> None:
    first, second = run_ranks(2, prepare_again_and_again, str(tmp_path))
    assert first == second
    # Costs are measured again for another form, and after the file was damaged.
    assert [measured for _, measured, _ in first] == [1, 0, 1, 1, 0]
    assert first[0][0] == first[1][0] and first[3][0] == first[4][0]
    contents = [json.loads(path.read_text()) for path in tmp_path.iterdir() if path.read_text().endswith("}\n")]
    (content,) = contents  # the file of the other form is still damaged
    assert content["context"]["shapes"] == [[64, 96], [96, 64]] and content["context"]["backend"] == "gloo"
    assert Costs(**content["costs"]) == first[4][0]


def prepare_on_one_disk_only(folder: str) -> list[PREPARED]:
    """Give the second rank an empty folder, as if it ran on another machine."""
    measure_quickly(2)
    own = folder if dist.get_rank() == 0 else folder + "-elsewhere"
    return [prepare(dist.group.WORLD, measure_costs=own) for _ in range(2)]


def test_one_rank_reads_the_cache_for_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, prepare_on_one_disk_only, str(tmp_path / "cache"))
    assert first == second and [measured for _, measured, _ in first] == [1, 0]
    assert not (tmp_path / "cache-elsewhere").exists()


def test_if_the_folder_cannot_be_written_to_costs_are_measured_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    first, second = run_ranks(2, prepare_on_one_disk_only, str(tmp_path / "file" / "folder"))
    assert [measured for _, measured, _ in first] == [1, 1]
    assert [len(warned) for _, _, warned in first] == [1, 1] and "cannot be kept" in first[0][2][0]
    assert [warned for _, _, warned in second] == [[], []]


def prepare_without_need() -> tuple[PREPARED, PREPARED]:
    measure_quickly(2)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    return prepare(alone, measure_costs=""), prepare(dist.group.WORLD, measure_costs=False)


def test_without_measuring_costs_have_their_defaults() -> None:
    for results in run_ranks(2, prepare_without_need):
        assert results == ((Costs(), 0, []), (Costs(), 0, []))


SIZES = (2**12, 2**16, 2**20)


@given(st.floats(0, 1e-2), st.floats(1e-11, 1e-6))
def test_the_fit_recovers_the_latency_and_bandwidth_of_a_link(latency: float, per_byte: float) -> None:
    link = fit_link(SIZES, [latency + size * per_byte for size in SIZES])
    assert link.latency_seconds == pytest.approx(latency, abs=1e-9)
    assert link.seconds_per_byte == pytest.approx(per_byte)


def test_fitted_links_equal_values_computed_by_hand() -> None:
    assert fit_link([1000], [0.5]) == FittedLink(0.0, 0.0005)  # the network was too slow to measure a second size
    assert fit_link([1000, 2000], [0.5, 0.4]) == FittedLink(0.5, 0.0)
    assert FittedLink(0.25, 0.5).seconds(Volume(2, 3)) == 2.0


def test_the_fits_recover_the_costs_of_products() -> None:
    shares = (0.25, 0.5, 0.9)
    assert fit_resize(shares, [1 - share + 0.02 + 0.1 * share for share in shares]) == pytest.approx((0.02, 0.1))
    assert fit_resize(shares, [0.7 * (1 - share) for share in shares]) == (0.0, 0.0)  # costs are never negative
    assert fit_receive_factor(shares, [1.2 * share for share in shares]) == pytest.approx(1.2)
