"""Profiles of several tensor-parallel degrees, merged into one: whose times a kind of device gets."""

from __future__ import annotations

from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile
from colossal_hetero.profiling.merge_ranks import MeasuredLayers, merge_degrees
from tests.support.layer_profiles import times_of


def measured(degree: int, devices: tuple[str, ...], seconds: dict[str, float]) -> tuple[int, MeasuredLayers]:
    times = tuple(
        LayerTimes(
            device=device,
            tensor_parallel=degree,
            micro_batch=1,
            forward_seconds=(each,) * 3,
            backward_seconds=(each,) * 3,
            update_seconds=(0.0,) * 3,
        )
        for device, each in seconds.items()
    )
    ones = (8 // degree,) * 3
    sizes = LayerSizes(tensor_parallel=degree, parameter_bytes=ones, activation_bytes=ones, output_bytes=ones)
    profile = ModelProfile(name="net", rank_devices=devices, times=times, sizes=(sizes,))
    return degree, MeasuredLayers(profile, devices, (100,) * len(devices))


def test_groups_have_the_kind_of_their_members() -> None:
    alone = measured(1, ("cpu", "cpu", "cpu-2", "cpu-2"), {"cpu": 1.0, "cpu-2": 3.0})
    # As groups, the slow ranks are the first ones of their kind.
    pairs = measured(2, ("cpu-2", "cpu-2", "cpu", "cpu"), {"cpu-2": 0.6, "cpu": 1.7})
    merged, remarks = merge_degrees([alone, pairs])
    profile = merged.profile
    assert remarks == () and merged.devices == profile.rank_devices == ("cpu", "cpu", "cpu-2", "cpu-2")
    assert profile.tensor_parallel_degrees("cpu") == profile.tensor_parallel_degrees("cpu-2") == (1, 2)
    assert times_of(profile, "cpu", 1, 1).forward_seconds[0] == 1.0
    assert times_of(profile, "cpu", 2, 1).forward_seconds[0] == 0.6
    assert times_of(profile, "cpu-2", 2, 1).forward_seconds[0] == 1.7
    assert [each.parameter_bytes[0] for each in profile.sizes] == [8, 4]


def test_of_several_groups_of_a_kind_the_slowest_counts() -> None:
    alone = measured(1, ("cpu",) * 4, {"cpu": 1.0})
    for devices in (("cpu", "cpu", "cpu-2", "cpu-2"), ("cpu-2", "cpu-2", "cpu", "cpu")):
        merged, _ = merge_degrees([alone, measured(2, devices, {"cpu": 0.9, "cpu-2": 0.6})])
        assert times_of(merged.profile, "cpu", 2, 1).forward_seconds[0] == 0.9


def test_groups_of_several_kinds_are_left_out() -> None:
    alone = measured(1, ("cpu", "cpu-2"), {"cpu": 1.0, "cpu-2": 3.0})
    merged, remarks = merge_degrees([alone, measured(2, ("cpu", "cpu"), {"cpu": 2.0})])
    assert merged == alone[1]
    assert remarks == ("tensor parallel 2: groups of unequal devices are left out: ranks 0 to 1 are cpu and cpu-2",)
