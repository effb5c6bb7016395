"""Measuring costs before training: the same on all ranks, without a trace."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.balance import BalanceConfig, Costs, pretest
from colossal_hetero.balance.plan import Traffic, Volume
from colossal_hetero.balance.pretest import fit_link, fit_products, seconds_of
from tests.support.checks import of_all_ranks, on

SHAPES = [(96, 64), (64, 96), (96, 64)]


def traffic(share: float) -> Traffic:
    sent = round(share * 1e6)
    return Traffic(Volume(4, sent), Volume(2, sent), Volume(2, sent))


def prepare(group: dist.ProcessGroup, form: Any = "block", **options: Any) -> tuple[Costs, int]:
    measurement = pretest.CostMeasurement(group, SHAPES, 40, torch.float32, torch.device("cpu"), traffic, form)
    with (
        patch.multiple(pretest, PRODUCT_SECONDS=0.01, MESSAGES={2**12: 3, 2**14: 3}),
        patch.object(pretest, "measure_costs", wraps=pretest.measure_costs) as measure,
    ):
        costs = pretest.prepare_costs(BalanceConfig(mode="auto", **options), measurement)
    return costs, measure.call_count


@on(2)
@on(3)
def all_ranks_have_the_same_costs_and_without_measuring_their_defaults() -> None:
    before = torch.get_rng_state()
    for form in ("column", "block"):
        found = of_all_ranks(prepare(dist.group.WORLD, form))
        costs, measured = found[0]
        assert found == [(costs, 1)] * len(found) and measured == 1
        assert costs.phi1(0.5) > 0 and costs.receive_factor > 0 and costs.communication_scale == 1.0
    assert torch.equal(torch.get_rng_state(), before), "measuring changed the state of the random numbers"
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    assert prepare(alone) == prepare(dist.group.WORLD, measure_costs=False) == (Costs(), 0)


SIZES = (2**12, 2**16, 2**20)


@given(st.floats(0, 1e-2), st.floats(1e-11, 1e-6))
def test_the_fit_recovers_the_latency_and_bandwidth_of_a_link(latency: float, per_byte: float) -> None:
    fitted = fit_link(SIZES, [latency + size * per_byte for size in SIZES])
    assert fitted == (pytest.approx(latency, abs=1e-9), pytest.approx(per_byte))


def test_fitted_links_equal_values_computed_by_hand() -> None:
    assert fit_link([1000], [0.5]) == (0.0, 0.0005)  # the network was too slow to measure a second size
    assert fit_link([1000, 2000], [0.5, 0.4]) == (0.5, 0.0)
    assert seconds_of(Volume(2, 3), 0.25, 0.5) == 2.0


def test_the_fits_recover_the_costs_of_products() -> None:
    taken = [1.2 * share for share in pretest.RECEIVED_SHARES]
    resized = [1 - share + 0.02 + 0.1 * share for share in pretest.RESIZED_SHARES]
    assert fit_products(resized, taken) == pytest.approx((0.02, 0.1, 1.2))
    free = [0.7 * (1 - share) for share in pretest.RESIZED_SHARES]
    assert fit_products(free, taken) == (0.0, 0.0, pytest.approx(1.2))  # costs are never negative
