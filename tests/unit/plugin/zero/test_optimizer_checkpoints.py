"""Which checkpoints of an optimizer are loaded."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero.plugin.zero.zero_checkpoints import check_groups, plain_name


def groups(stage: int, *names: str) -> list[dict[str, Any]]:
    """One group for each text, with a parameter for each of its letters."""
    starts = [sum(map(len, names[:index])) for index in range(len(names))]
    return [
        {"params": list(range(start, start + len(each))), "param_names": list(each), "zero_stage": stage}
        for start, each in zip(starts, names, strict=True)
    ]


@pytest.mark.parametrize(
    ("saved", "present"),
    [
        (groups(1, "ab", "c"), groups(1, "ab", "c")),
        (groups(0, "ab", "c"), groups(2, "ab", "c")),  # nothing is frozen
        (groups(3, "bca"), groups(3, "abc")),  # other modules are wrapped
    ],
)
def test_the_same_parameters_are_loaded(saved: Any, present: Any) -> None:
    check_groups(saved, present)


@pytest.mark.parametrize(
    ("saved", "present", "words"),
    [
        (groups(0, "abc"), groups(1, "bc"), "use stage=0"),  # a is frozen
        (groups(1, "abc"), groups(3, "abc"), "use stage=1"),
        (groups(3, "abc"), groups(0, "abc"), "use stage=3.*layer checkpoints"),
        (groups(1, "abc"), groups(1, "acb"), "in another order"),
        (groups(1, "ab", "c"), groups(1, "abc"), "2 groups of 2, 1 parameters.*1 groups of 3 parameters"),
        (groups(3, "ab", "c"), groups(3, "ac", "b"), "has other ones"),
        ([{"params": [0, 1]}], groups(1, "ab"), "does not contain the names of its parameters"),
    ],
)
def test_other_stages_parameters_or_groups_are_refused(saved: Any, present: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_groups(saved, present)


def test_names_do_not_depend_on_wrappers() -> None:
    assert plain_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight") == "layers.0.weight"
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
