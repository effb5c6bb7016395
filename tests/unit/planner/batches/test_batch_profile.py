"""The profile file: saving and loading, error messages, and the memory at other stages of ZeRO."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colossal_hetero.planner.batches.batch_profile import (
    BatchProfile,
    DeviceProfile,
    ModelIdentity,
    load_profile,
    save_profile,
    state_bytes,
)
from colossal_hetero.planner.cluster.topology import MeasuredLink
from tests.support.changed_files import error_after, put

GIB = 2**30
MODEL = ModelIdentity(
    name="net", parameters=GIB, parameter_bytes=2 * GIB, gradient_bytes=2 * GIB, optimizer_bytes=12 * GIB, digest="abc"
)


def device(name: str = "fast", **changes: Any) -> DeviceProfile:
    values: dict[str, Any] = {
        "device": name,
        "memory_bytes": 24 * GIB,
        "state_bytes": 16 * GIB,
        "sample_bytes": 2 * GIB,
        "max_batch": 4,
        "memory_bound": True,
        "points": [{"batch": 1, "seconds": 0.1}, {"batch": 4, "seconds": 0.25}],
        "flops": 1e12,
    }
    return DeviceProfile(**{**values, **changes})


def profile(**changes: Any) -> BatchProfile:
    values: dict[str, Any] = {
        "stage": 0,
        "precision": "fp16",
        "model": MODEL,
        "communication_seconds": 0.5,
        "kinds": [device(), device("slow", max_batch=2, memory_bytes=21 * GIB, protocols=["nccl", "gloo"])],
        "ranks": [0, 1, 0, 1],
        "links": [MeasuredLink(ranks=(0, 1), protocol="gloo", latency_seconds=1e-4, bytes_per_second=1e9)],
    }
    return BatchProfile(**{**values, **changes})


def test_a_saved_profile_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    assert list(tmp_path.iterdir()) == [path]
    text = path.read_text()
    assert json.loads(text)["schema"] == 1
    assert '{ "batch": 1, "seconds": 0.1 }' in text  # one line per point, easy to edit


def test_curves_communication_and_flops_of_a_profile() -> None:
    curves = profile().curves(0)
    assert curves[0] is curves[2] and curves[1] is curves[3] and curves[0] is not curves[1]
    assert [curve.max_batch for curve in curves] == [4, 2, 4, 2]
    assert [curve.max_batch for curve in profile().curves(0, largest=3)] == [3, 2, 3, 2]
    assert [profile().communication(stage) for stage in range(4)] == [0.5, 0.25, 0.25, 0.75]
    assert profile(stage=2).communication(2) == 0.5
    assert profile().flops == [1e12] * 4
    assert profile(kinds=[device(), device("slow", flops=None)]).flops is None
    points = [{"batch": 4, "seconds": 0.3}, {"batch": 1, "seconds": 0.1}]
    assert [point.batch for point in device(points=points).points] == [1, 4]
    with pytest.raises(ValueError, match="ZeRO has no stage 7; its stages are 0, 1, 2 and 3"):
        profile().curves(7)
    bad = device("bad", points=[{"batch": 1, "seconds": 0.5}, {"batch": 2, "seconds": 0.2}])
    with pytest.raises(ValueError, match=r"device bad: .*batch 2 takes 0.2"):
        profile(kinds=[device(), bad]).curves(0)


def test_state_bytes_at_each_zero_stage() -> None:
    assert [state_bytes(MODEL, stage, 4) / GIB for stage in range(4)] == [16, 7, 5.5, 4]
    odd = MODEL.model_copy(update={"optimizer_bytes": 7})
    assert state_bytes(odd, 1, 2) - 4 * GIB == 4


def test_a_smaller_state_leaves_memory_for_larger_batches() -> None:
    # The state is 9, 10.5 and 12 GiB smaller than at stage 0; a sample takes 2 GiB.
    assert [profile().kind_max_batches(stage)[0] for stage in range(4)] == [4, 4 + 4, 4 + 5, 4 + 6]
    # At stage 0 the memory for half a sample stays unused; at stage 1 it is used.
    assert [profile().kind_max_batches(stage)[1] for stage in range(2)] == [2, 2 + 5]
    assert profile().state_bytes(3) == [4 * GIB, 4 * GIB]
    # If the measured largest batch differs from the computed one, the predictions are corrected by the difference.
    wasteful = profile(kinds=[device(max_batch=3)], ranks=[0] * 4, links=[])
    assert wasteful.kind_max_batches(3)[0] == 9
    # Fewer ranks each hold more of the state.
    assert profile().state_bytes(0, 2) == profile().state_bytes(0) and profile().state_bytes(3, 2) == [8 * GIB] * 2
    assert [curve.max_batch for curve in profile().curves(3, sharing_ranks=2)] == [8, 6, 8, 6]


def test_a_device_without_enough_memory_may_hold_a_sample_at_the_next_stage() -> None:
    small = device("small", max_batch=0, memory_bytes=10 * GIB)
    one = profile(kinds=[device(), small], ranks=[0, 1, 1, 1], links=[])
    assert [one.kind_max_batches(stage)[1] for stage in range(4)] == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match=r"ranks 1-3 \(small\) cannot hold one sample at stage 0.*at stage 1 one sample fits"
    ):
        one.curves(0)
    assert one.curves(1)[1].max_batch == 1
    tiny = profile(kinds=[device(), device("tiny", max_batch=0, memory_bytes=GIB, points=[])], ranks=[0, 1], links=[])
    with pytest.raises(ValueError, match="at higher stages no sample fits either; otherwise leave that device out"):
        tiny.curves(2)


def test_a_profile_of_another_run_is_rejected() -> None:
    mine = profile()
    mine.check_fits(["fast", "slow", "fast", "slow"], "abc", stage=0, precision="fp16")
    for devices, digest, options, words in (
        (["fast", "slow"], "abc", {}, "of 4 ranks, but there are 2"),
        (["fast", "slow", "slow", "slow"], "abc", {}, "other devices: rank 2 was fast, now it is slow"),
        (["fast", "slow", "fast", "slow"], "xyz", {}, r"another model \(net, 1,073,741,824 parameters, .*xyz"),
        (["fast", "slow", "fast", "slow"], "abc", {"stage": 3}, "made at stage 0, not 3"),
        (["fast", "slow", "fast", "slow"], "abc", {"precision": "bf16"}, "made at precision fp16, not bf16"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*; make a new profile"):
            mine.check_fits(devices, digest, **{"stage": 0, "precision": "fp16", **options})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("schema", value=2), "has schema 2, this version reads schema 1; make a new profile"),
        (lambda content: content.pop("schema"), 'it has no "schema"'),
        (put("kinds", 0, "points", 1, "seconds", value=-0.1), r"kinds\[0\].points\[1\].seconds is -0.1: must be"),
        (put("kinds", 0, "points", 0, "batch", value=4), r"kinds\[0\].points: duplicate batch 4"),
        (put("kinds", 0, "points", value=[]), "max_batch=4, but there are no points; measure"),
        (put("kinds", 1, "memory_bound", value=1), "memory_bound is 1: must be true or false"),
        (put("model", value=[]), r"model is \[\]: must be an object"),
        (put("ranks", value=[0, 2]), r"ranks\[1\] is kind 2, but kinds are numbered 0 to 1"),
        (put("links", 0, "ranks", value=[0, 4]), r"links\[0\] joins ranks 0 and 4, but ranks are numbered 0 to 3"),
        (put("links", 0, "ranks", value=[1, 1]), "joins two different ranks, but both are rank 1"),
    ],
)
def test_error_messages_name_the_field(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    save_profile(profile(), tmp_path / "broken.json")
    message = error_after(change, tmp_path / "broken.json", load_profile)
    assert re.search(words, message), message
