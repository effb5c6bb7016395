"""Which parameter of an optimizer a number in a checkpoint means."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossal_hetero.plugin.zero.optimizer_checkpoints import ParameterFacts, match_groups, plain_name, states_by_name


def saved(*groups: tuple[list[int], list[str] | None], **options: Any) -> list[dict[str, Any]]:
    return [
        {"lr": 0.1 * (index + 1), "params": numbers, **({} if names is None else {"param_names": names}), **options}
        for index, (numbers, names) in enumerate(groups)
    ]


def groups(*names: list[str]) -> list[dict[str, Any]]:
    return [{"lr": 7.0, "params": [], "param_names": each} for each in names]


def facts(**trained: bool) -> dict[str, ParameterFacts]:
    return {name: ParameterFacts(name, (2, 3), value) for name, value in trained.items()}


ABC = facts(a=True, b=True, c=True)


def test_frozen_parameters_may_be_missing_on_either_side() -> None:
    known = facts(a=True, b=False, c=True)
    assert match_groups(saved(([0, 1], ["a", "c"])), groups(["a", "b", "c"]), known).names == {0: "a", 1: "c"}
    assert match_groups(saved(([0, 1, 2], ["a", "b", "c"])), groups(["a", "c"]), known).names == {0: "a", 2: "c"}
    only_frozen = match_groups(saved(([0], ["a"])), groups(["a"], ["b"]), known)
    assert only_frozen.options == [{"lr": 0.1}, {"lr": 7.0}]


def test_other_parameters_or_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="has no parameter b, which this optimizer trains"):
        match_groups(saved(([0, 1], ["a", "c"])), groups(["a", "b", "c"]), ABC)
    with pytest.raises(ValueError, match="those of group 0 are in its groups 0, 1"):
        match_groups(saved(([0], ["a"]), ([1, 2], ["b", "c"])), groups(["a", "b", "c"]), ABC)
    with pytest.raises(ValueError, match="those of group 1 are in its group 0"):
        match_groups(saved(([0, 1, 2], ["a", "b", "c"])), groups(["a"], ["b", "c"]), ABC)


def test_without_names_the_order_counts() -> None:
    match = match_groups(saved(([0, 1], None), ([2], None)), groups(["b", "a"], ["c"]), ABC)
    assert match.names == {0: "b", 1: "a", 2: "c"} and match.options == [{"lr": 0.1}, {"lr": 0.2}]
    with pytest.raises(
        ValueError, match=r"has 1 groups of 2 parameters, this optimizer 1 groups of 3.*stage that it was"
    ):
        match_groups(saved(([0, 1], None)), groups(["a", "b", "c"]), ABC)


def test_states_of_other_parameters_or_shapes_are_refused() -> None:
    match = match_groups(saved(([0, 1], ["a", "z"])), groups(["a"]), facts(a=True))
    state = {"exp_avg": torch.zeros(2, 3), "step": torch.tensor(3.0)}
    assert states_by_name([(0, state), (1, {})], match, facts(a=True)) == {"a": state}
    with pytest.raises(ValueError, match="has the state of parameter 1, which this optimizer does not train"):
        states_by_name([(0, state), (1, state)], match, facts(a=True))
    with pytest.raises(ValueError, match=r"has shape \(3, 2\), but parameter 0 is a with shape \(2, 3\)"):
        states_by_name([(0, {"momentum_buffer": torch.zeros(3, 2)})], match, facts(a=True))


def test_names_do_not_depend_on_wrappers() -> None:
    assert plain_name("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight") == "layers.0.weight"
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
