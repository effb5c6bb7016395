"""The profile file of layers: saving and loading, error messages, interpolation, and the cache of costs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.profile.layer_profile import (
    BlockRun,
    LayerSizes,
    LayerTimes,
    ModelProfile,
    load_profile,
    save_profile,
)
from tests.support.changed_files import error_after, put


def times(device: str = "fast", micro_batch: int = 1, factor: float = 1.0, **fields: Any) -> dict[str, Any]:
    content = {
        "device": device,
        "micro_batch": micro_batch,
        "forward_seconds": [factor * each for each in (0.5, 1.0, 2.0, 3.0, 0.25)],
        "backward_seconds": [factor * each for each in (1.0, 2.0, 4.0, 6.0, 0.5)],
        "update_seconds": [0.1, 0.2, 0.3, 0.4, 0.5],
    }
    return {**content, **fields}


def sizes(**fields: Any) -> dict[str, Any]:
    content = {
        "parameter_bytes": [100, 10, 20, 30, 50],
        "activation_bytes": [7, 11, 13, 17, 5],
        "output_bytes": [3, 3, 4, 5, 1],
    }
    return {**content, **fields}


def profile(**fields: Any) -> ModelProfile:
    content: dict[str, Any] = {
        "name": "net",
        "times": [
            times(block_runs=[{"blocks": 1, "forward_seconds": 1, "backward_seconds": 2}]),
            times(micro_batch=4, factor=3.0),
            times("slow", factor=5.0),
        ],
        "sizes": [sizes()],
        "rank_devices": ["fast", "slow"],
    }
    return ModelProfile.model_validate({**content, **fields})


def test_a_saved_profile_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    saved = profile()
    saved.costs("fast", 1, 2)
    save_profile(saved, path)
    assert load_profile(path) == profile() == saved
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["schema"] == 1


def test_layers_before_and_after_the_blocks_are_added_to_the_first_and_the_last_block() -> None:
    costs = profile().costs("fast", 1, 4)
    np.testing.assert_allclose(costs.forward_seconds, [4.5, 6.0, 9.75])
    np.testing.assert_allclose(costs.backward_seconds, [9.0, 12.0, 19.5])
    np.testing.assert_allclose(costs.update_seconds, [0.3, 0.3, 0.9])
    np.testing.assert_allclose(costs.state_bytes, [440, 80, 320])
    np.testing.assert_allclose(costs.gradient_bytes, [110, 20, 80])
    np.testing.assert_allclose(costs.activation_bytes, [4 * 18, 4 * 13, 4 * 22])
    np.testing.assert_allclose(costs.output_bytes, [12, 16, 20])


def test_the_time_of_the_schedule_is_interpolated_and_0_in_files_without_it() -> None:
    assert profile().costs("fast", 1, 2).schedule_seconds == 0
    mine = profile(
        times=[times(schedule_seconds=0.2), times(micro_batch=4, factor=3.0, schedule_seconds=0.5)], rank_devices=[]
    )
    assert [mine.costs("fast", 1, size).schedule_seconds for size in (1, 2, 4)] == pytest.approx([0.2, 0.3, 0.5])
    assert mine.costs("fast", 1, 2, speed=0.5).schedule_seconds == pytest.approx(0.6)


def test_a_single_block_includes_the_layers_before_and_after() -> None:
    single = {
        "times": [times(**{f"{what}_seconds": [1, 2, 4] for what in ("forward", "backward", "update")})],
        "sizes": [sizes(**{f"{what}_bytes": [1, 2, 4] for what in ("parameter", "activation", "output")})],
        "rank_devices": [],
    }
    costs = profile(**single).costs("fast", 1, 1)
    assert costs.forward_seconds.tolist() == [7]
    # In backward, the block needs twice its 2 bytes for a moment, and the head twice its 4, which the last stage adds.
    assert costs.activation_bytes.tolist() == [7 + 2 * 4 - 2 * 2] and costs.temporary_bytes == 2 * 2


def test_measured_temporaries_are_used() -> None:
    """Of several blocks the largest counts, and less in the head than in a block adds nothing."""
    each = {f"{what}_seconds": [1] * 5 for what in ("forward", "backward", "update")}
    part = {f"{what}_bytes": [1, 2, 3, 2, 4] for what in ("parameter", "activation", "output")}
    mine = profile(times=[times(**each)], sizes=[sizes(**part, temporary_bytes=[90, 10, 40, 20, 35])], rank_devices=[])
    costs = mine.costs("fast", 1, 1)
    assert costs.temporary_bytes == 40 and costs.activation_bytes.tolist() == [3, 3, 6]
    assert costs.memory_for_blocks(100, 2) == 60 and costs.memory_for_blocks(30, 2) == 0
    # A single stage also has buckets, which are as large as the parameters.
    assert costs.memory_for_blocks(100, 1) == 60 - sum(part["parameter_bytes"])


def test_temporaries_that_do_not_grow_with_the_micro_batch() -> None:
    each = {f"{what}_seconds": [1] * 5 for what in ("forward", "backward", "update")}
    part = {f"{what}_bytes": [1, 2, 3, 2, 4] for what in ("parameter", "activation", "output")}
    measured = {"temporary_bytes": [0, 10, 4, 2, 6], "fixed_temporary_bytes": [900, 10, 100, 0, 110]}
    mine = profile(
        times=[times(**each), times(micro_batch=4, **each)], sizes=[sizes(**part, **measured)], rank_devices=[]
    )
    one, four = (mine.costs("fast", 1, size) for size in (1, 4))
    # The second block needs the most in both; the head needs 116 and 134, which the last stage adds.
    assert one.temporary_bytes == 104 and one.activation_bytes.tolist() == [3, 3, 6 + 12]
    assert four.temporary_bytes == 116 and four.activation_bytes.tolist() == [12, 12, 24 + 18]
    with pytest.raises(ValueError, match="4 fixed_temporary_bytes"):
        profile(sizes=[sizes(**part, fixed_temporary_bytes=[1] * 4)])


def test_the_same_arguments_give_the_same_costs() -> None:
    mine = profile()
    assert mine.costs("fast", 1, 2) is mine.costs("fast", 1, 2)
    assert mine.costs("fast", 1, 2) is not mine.costs("fast", 1, 2, speed=0.5)
    assert mine.costs("fast", 1, 1) is not mine.costs("slow", 1, 1)
    with pytest.raises(ValueError, match="read-only"):
        mine.costs("fast", 1, 2).forward_seconds[0] = 0


def test_a_changed_copy_has_separate_costs() -> None:
    mine = profile()
    before = mine.costs("fast", 1, 1)
    changed = mine.model_copy(update={"times": (LayerTimes.model_validate(times("other", factor=2.0)),)})
    assert changed.devices == ("other",)
    np.testing.assert_allclose(changed.costs("other", 1, 1).forward_seconds, 2 * before.forward_seconds)
    assert mine.costs("fast", 1, 1) is before


def test_half_the_speed_takes_twice_the_time_and_the_same_memory() -> None:
    whole, half = profile().costs("fast", 1, 1), profile().costs("fast", 1, 1, speed=0.5)
    for name in ("forward_seconds", "backward_seconds", "update_seconds"):
        np.testing.assert_allclose(getattr(half, name), 2 * getattr(whole, name))
    for name in ("state_bytes", "gradient_bytes", "activation_bytes", "output_bytes"):
        np.testing.assert_allclose(getattr(half, name), getattr(whole, name))
    with pytest.raises(ValueError, match=r"speed=0\.0.*above 0"):
        profile().costs("fast", 1, 1, speed=0.0)


def test_between_measured_micro_batches_times_are_interpolated() -> None:
    costs = profile().costs("fast", 1, 3)
    # From factor 1 at one sample to factor 3 at four: 1 + 2·(2/3).
    np.testing.assert_allclose(costs.forward_seconds, np.array([1.5, 2.0, 3.25]) * (1 + 4 / 3))
    np.testing.assert_allclose(costs.activation_bytes, [3 * 18, 3 * 13, 3 * 22])


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.sets(st.integers(1, 12), min_size=6, max_size=6),
)
def test_smaller_micro_batches_never_take_longer(factors: list[float], batches: set[int]) -> None:
    measured = sorted(batches)[: len(factors)]
    mine = profile(
        times=[times(micro_batch=size, factor=factor) for size, factor in zip(measured, factors, strict=True)],
        rank_devices=[],
    )
    totals = [mine.costs("fast", 1, size).forward_seconds.sum() for size in range(measured[0], measured[-1] + 1)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(totals))
    for place, size in enumerate(measured):
        least = min(factors[place:])
        assert mine.costs("fast", 1, size).forward_seconds.sum() == pytest.approx(6.75 * least)


def test_a_profile_lists_what_was_measured() -> None:
    mine = profile(
        times=[times(micro_batch=4), times(), times("slow"), times("slow", tensor_parallel=2)],
        sizes=[sizes(), sizes(tensor_parallel=2)],
    )
    assert mine.devices == ("fast", "slow")
    assert mine.tensor_parallel_degrees("slow") == (1, 2)
    assert mine.micro_batches("fast", 1) == (1, 4)
    assert mine.times_of("fast", 1, 4).micro_batch == 4
    assert (mine.layers, mine.blocks) == (5, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fsat", 1, 1), r"no times of device 'fsat', only of fast, slow; did you mean fast\?"),
        (("A100", 1, 1), "no times of device 'A100', only of fast, slow; measure it"),
        (("fast", 2, 1), "fast was not measured at tensor_parallel 2; it was at 1"),
        (("fast", 1, 5), r"micro-batch 5 on fast .*outside of what was measured \(1, 4\); use 1 to 4, or measure it"),
        (("fast", 1, 0), "micro-batch 0 on fast"),
        (("slow", 1, 2), r"outside of what was measured \(1\); use 1, or measure it"),
    ],
)
def test_the_error_for_unmeasured_costs_says_what_was_measured(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        profile().costs(*arguments)


def test_times_of_an_unmeasured_micro_batch() -> None:
    with pytest.raises(ValueError, match="micro-batch 2 on fast at tensor_parallel 1 was not measured; 1, 4 were"):
        profile().times_of("fast", 1, 2)


def test_many_blocks_are_composed_of_powers_of_two() -> None:
    runs = [BlockRun(blocks=n, forward_seconds=s, backward_seconds=2 * s) for n, s in ((4, 3.5), (1, 1.0), (2, 1.9))]
    mine = LayerTimes.model_validate(times(block_runs=runs))
    assert [run.blocks for run in mine.block_runs] == [1, 2, 4]
    # 3 = 2 + 1, 7 = 4 + 2 + 1, 13 = 3·4 + 1
    for blocks, forward in ((1, 1.0), (3, 2.9), (7, 6.4), (13, 11.5)):
        assert mine.composed_seconds(blocks) == pytest.approx(3 * forward)
    with pytest.raises(ValueError, match=r"3 blocks are not a sum of measured runs .*\(2 blocks\)"):
        LayerTimes.model_validate(times(block_runs=runs[2:])).composed_seconds(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("schema", value=2), "has schema 2, this version reads schema 1; make a new profile"),
        (put("schema", value=True), "has schema True"),
        (lambda content: content.pop("schema"), 'it has no "schema"'),
        (lambda content: content.pop("name"), "name is missing"),
        (put("times", value=[]), "times is .*: must not be empty"),
        (put("sizes", value=[]), "sizes is .*: must not be empty"),
        (put("before", value=-1), "before is -1: must be at least 0"),
        (put("before", value=4), "4 of 5 layers are before the blocks and 1 after them.*must be at least one"),
        (put("times", 0, "forward_seconds", 2, value=-1), r"times\[0\].forward_seconds\[2\] is -1: must be at least 0"),
        (put("times", 0, "update_seconds", 2, value=float("nan")), r"update_seconds\[2\] is nan: must be a"),
        (put("times", 0, "update_seconds", 2, value=float("inf")), r"update_seconds\[2\] is inf: must be a"),
        (put("times", 0, "forward_seconds", value=[1.0]), r"times\[0\]: there are 1 forward_seconds, 5 backward"),
        (put("sizes", 0, "output_bytes", value=[1]), r"sizes\[0\]: there are .* 1 output_bytes; all lists"),
        (put("sizes", 0, "parameter_bytes", 1, value=1.5), r"parameter_bytes\[1\] is 1.5: must be a whole number"),
        (put("sizes", 0, "parameter_bytes", 1, value=-1), r"parameter_bytes\[1\] is -1: must be at least 0"),
        (
            put("sizes", 0, value=sizes(**{name: [1] * 6 for name in sizes()})),
            r"times\[0\] has 5 layers, sizes\[0\] ",
        ),
        (lambda content: content["sizes"].append(sizes(tensor_parallel=2, **{n: [1] for n in sizes()})), r"sizes\[1\]"),
        (
            put("times", 1, "micro_batch", value=1),
            "times has two entries of micro-batch 1 on fast at tensor_parallel 1",
        ),
        (lambda content: content["sizes"].append(sizes()), "sizes has two entries of tensor_parallel 1; keep one"),
        (
            put("times", 1, "tensor_parallel", value=2),
            r"times\[1\] is at tensor_parallel 2.*no sizes have that degree \(sizes has 1\)",
        ),
        (
            put("times", 0, "block_runs", value=[{"blocks": 2, "forward_seconds": 1, "backward_seconds": 1}] * 2),
            "there are two runs of 2 blocks",
        ),
        (put("state_factor", value=0), "state_factor is 0: must be at least 1e-09"),
        (put("units", "seconds", value="ms"), "seconds is in 'ms', but is read in 's'"),
        (put("times", 0, "forward_second", value=1), r"forward_second is not a field; did you mean forward_seconds\?"),
        (
            put("rank_devices", value=["fast", "third"]),
            "rank_devices names third, but there are only times of fast, slow",
        ),
        (
            put("context_bytes", value={"third": 1}),
            "context_bytes names third, but there are only times of fast, slow",
        ),
    ],
)
def test_error_messages_name_the_field(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    path = tmp_path / "broken.json"
    save_profile(profile(), path)
    text = error_after(change, path, load_profile)
    assert re.search(words, text), text


def test_a_profile_of_batches_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "batches.json"
    path.write_text('{"schema": 1, "kinds": []}')
    with pytest.raises(
        ValueError, match="is a profile of batches; make a profile of layers with colossal-hetero profile"
    ):
        load_profile(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a profile of layers"):
        load_profile(path)


def test_lists_of_sizes_must_have_equal_lengths() -> None:
    with pytest.raises(ValueError, match="2 parameter_bytes, 1 activation_bytes"):
        LayerSizes(parameter_bytes=(1, 2), activation_bytes=(1,), output_bytes=(1, 2))
