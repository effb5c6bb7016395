"""Which checkpoints of an optimizer are loaded, and which parameter a number in one means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossal_hetero.plugin.zero.optimizer_checkpoints import check_groups, check_shapes, plain_name


def groups(stage: int, *names: str) -> list[dict[str, Any]]:
    """One group for each text, with a parameter for each of its letters."""
    starts = [sum(map(len, names[:index])) for index in range(len(names))]
    return [
        {"params": list(range(start, start + len(each))), "param_names": list(each), "zero_stage": stage}
        for start, each in zip(starts, names, strict=True)
    ]


def without_names(saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in saved]


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [
        (groups(1, "ab", "c"), groups(1, "ab", "c"), "abc"),
        (groups(0, "ab", "c"), groups(2, "ab", "c"), "abc"),  # nothing is frozen
        (groups(3, "bca"), groups(3, "abc"), "bca"),  # other modules are wrapped
        (without_names(groups(1, "ab", "c")), groups(1, "ba", "c"), "bac"),
    ],
)
def test_numbers_mean_the_parameters_of_the_checkpoint(saved: Any, present: Any, expected: str) -> None:
    assert check_groups(saved, present) == dict(enumerate(expected))


@pytest.mark.parametrize(
    ("saved", "present", "words"),
    [
        (groups(0, "abc"), groups(1, "bc"), "use stage=0"),  # a is frozen
        (groups(1, "abc"), groups(3, "abc"), "use stage=1"),
        (groups(3, "abc"), groups(0, "abc"), "use stage=3.*layer checkpoints"),
        (groups(1, "abc"), groups(1, "acb"), "in another order"),
        (groups(1, "ab", "c"), groups(1, "abc"), "2 groups of 2, 1 parameters.*1 groups of 3 parameters"),
        (groups(3, "ab", "c"), groups(3, "ac", "b"), "has other ones"),
        (without_names(groups(1, "ab")), groups(1, "abc"), r"1 groups of 2 parameters, this optimizer 1 groups of 3"),
    ],
)
def test_other_stages_parameters_or_groups_are_refused(saved: Any, present: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_groups(saved, present)


def test_other_shapes_are_refused() -> None:
    check_shapes({0: {"exp_avg": torch.zeros(2, 3), "step": torch.tensor(3.0)}}, {0: "a"}, {"a": (2, 3)})
    with pytest.raises(ValueError, match=r"has shape \(3, 2\), but parameter 0 is a with shape \(2, 3\)"):
        check_shapes({0: {"momentum_buffer": torch.zeros(3, 2)}}, {0: "a"}, {"a": (2, 3)})


def test_names_do_not_depend_on_wrappers() -> None:
    assert plain_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight") == "layers.0.weight"
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
