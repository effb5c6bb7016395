"""What peers' planners read is written from our numbers, and their plans are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.planner.peers.compare import PricedPlan, count_wins
from benchmarks.planner.peers.inputs import NOT_TIMED, ZONE, bandwidth_rows, sailor_times
from benchmarks.planner.sailor_tables import GpuChannels
from colossal_hetero.planner.cluster.topology import Channel
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile
from tests.unit.planner.report.test_plan_table import plan


def channels(one: float, four: float) -> GpuChannels:
    between = {
        number: Channel("Ethernet", 1e9 * most, curve=(0.0, 0.0, most)) for number, most in ((1, one), (4, four))
    }
    return GpuChannels({}, between)


def test_bandwidths_are_those_of_the_slower_kind_and_the_fewer_gpus() -> None:
    rows = bandwidth_rows({"A": channels(2, 6), "B": channels(1, 7)})[ZONE]
    assert rows["A"]["4"][ZONE]["B"]["4"] == [[0.0, 0.0, 6], 6e9]
    assert rows["B"]["4"][ZONE]["A"]["4"] == [[0.0, 0.0, 6], 6e9]
    assert rows["A"]["1"][ZONE]["B"]["4"] == [[0.0, 0.0, 1], 1e9]
    assert rows["A"]["4"][ZONE]["A"]["1"] == [[0.0, 0.0, 2], 2e9]


def test_times_of_degrees_that_were_not_timed() -> None:
    step = (1.0, 2.0, 2.0, 2.0, 4.0)
    timed = LayerTimes(
        device="A",
        tensor_parallel=1,
        micro_batch=2,
        forward_seconds=(0.1, 0.2, 0.2, 0.2, 0.3),
        backward_seconds=(0.0, 0.4, 0.4, 0.4, 0.6),
        update_seconds=step,
    )
    profile = SimpleNamespace(times=(timed,), layers=5, before=1, after=1)
    times = sailor_times(cast(ModelProfile, profile), "A", (1, 2), (1, 4))
    assert times["2"]["1"]["1"] == [0.2, 0.4, 9.0]  # The step of the embedding, two blocks and the head.
    assert times["1"]["1"]["0"] == times["2"]["4"]["0"] == [NOT_TIMED, NOT_TIMED, 0.0]


def priced(*seconds: float | None, fits: bool = True) -> PricedPlan:
    return PricedPlan(cast(Any, plan()), seconds, fits, "")


def test_wins_are_counted_where_a_plan_has_a_price_and_a_rival() -> None:
    cases: list[dict[str, PricedPlan | str]] = [
        {"ours": priced(1.0, None), "peer": priced(1.005, 2.0), "other": priced(0.5, 1.0)},
        {"ours": priced(2.0, 3.0), "peer": priced(1.6, 3.2), "other": priced(0.5, 1.0)},
        {"ours": priced(2.0, 3.0), "peer": priced(1.0, 1.0, fits=False)},
        {"ours": "no plan", "peer": priced(1.0, 1.0)},
    ]
    found = count_wins(cases, "ours", 0, {"peer"}.__contains__)
    assert (found.rows, found.wins, found.behind) == (2, 1, 1.25)
    found = count_wins(cases, "ours", 1, {"peer"}.__contains__)
    assert (found.rows, found.wins, found.behind) == (1, 1, 1.0)
