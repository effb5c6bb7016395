"""A profile takes the times of a further kind of device, of the same model only."""

from __future__ import annotations

import pytest

from colossal_hetero.planner.profile.fitted_profiles import with_kind
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from tests.support.layer_profiles import layer_times


def profile(*kinds: str, layers: int = 4, micro_batch: int = 2, precision: str = "fp32") -> ModelProfile:
    """A model whose layers take as many seconds as the name of the kind has letters."""
    sizes = LayerSizes(parameter_bytes=(8,) * layers, activation_bytes=(4,) * layers, output_bytes=(2,) * layers)
    times = tuple(layer_times(kind, (float(len(kind)),) * layers, micro_batch=micro_batch) for kind in kinds)
    return ModelProfile(
        name="model",
        precision=precision,
        times=times,
        sizes=(sizes,),
        rank_devices=kinds,
        context_bytes={kind: len(kind) for kind in kinds},
    )


def test_the_measured_kind_has_the_name_of_the_cluster_file() -> None:
    before = profile("one", "other")
    after = with_kind(before, "new", profile("measured"))
    assert after.devices == ("one", "other", "new")
    assert after.times_of("new", 1, 2).forward_seconds == (8.0,) * 4
    assert after.context_bytes == {"one": 3, "other": 5, "new": 8}
    assert after.costs("new", 1, 2).forward_seconds.sum() == pytest.approx(32.0)
    assert before.devices == ("one", "other")
    # What it says is a valid file.
    assert ModelProfile.model_validate_json(after.model_dump_json(by_alias=True)) == after


@pytest.mark.parametrize(
    ("kind", "measured", "message"),
    [
        ("one", profile("measured"), "has times of one already"),
        ("new", profile("measured", layers=5), "layers 5 instead of 4"),
        ("new", profile("measured", precision="bf16"), "precision bf16 instead of fp32"),
        ("new", profile("measured", micro_batch=3), "micro-batches of 3 were measured on new, but the profile has 2"),
        ("new", profile("a", "b"), "times of a, b were measured for new"),
    ],
)
def test_what_does_not_belong_together(kind: str, measured: ModelProfile, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_kind(profile("one"), kind, measured)
