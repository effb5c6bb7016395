"""What can be said about batches, and what is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero import BatchConfig
from colossal_hetero.plugin.zero import stages_to_try


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0 must be at least 1"),
        ({"global_batch_size": -8}, ValueError, "global_batch_size=-8 must be at least 1"),
        ({"global_batch_size": 8.0}, TypeError, "global_batch_size=8.0 must be a whole number"),
        ({"global_batch_size": True}, TypeError, "global_batch_size=True must be a whole number"),
        ({"max_micro_batch": 0}, ValueError, "max_micro_batch=0 must be at least 1"),
        ({"check_every": 0}, ValueError, "check_every=0 must be at least 1"),
        ({"method": "fastest"}, ValueError, "method='fastest' is not one of exact, uniform, flops"),
        ({"accumulation": "mine"}, ValueError, "accumulation='mine' is not one of shared, per_rank"),
        ({"reallocate_above": 0}, ValueError, "reallocate_above=0 must be above 0"),
        ({"reallocate_above": float("nan")}, ValueError, "reallocate_above=nan must be above 0"),
    ],
)
def test_impossible_values(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        BatchConfig(**{"global_batch_size": 8, **arguments})


def test_the_old_spelling_of_per_rank_is_accepted_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match='"own" is now spelled "per_rank"') as caught:
        config = BatchConfig(global_batch_size=8, accumulation="own")
    assert config.accumulation == "per_rank" and caught[0].filename == __file__



@pytest.mark.parametrize("stage", [4, -1, "3", None, True, 1.5])
def test_a_stage_that_does_not_exist(stage: Any) -> None:
    with pytest.raises(ValueError, match=r'is not a stage of ZeRO; there are 0, 1, 2, 3 and "auto"'):
        stages_to_try(stage, "fp32", "shared")


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation", "words"),
    [
        (1, "fp8", "shared", "precision='fp8' is not one of fp32, fp16, bf16"),
        (3, "fp16", "shared", "precision='fp16' is not available at stage 3; use fp32 or bf16"),
        (2, "fp32", "per_rank", 'accumulation="per_rank" needs stage 0 or 1, not 2'),
        (3, "bf16", "per_rank", 'accumulation="per_rank" needs stage 0 or 1, not 3'),
    ],
)
def test_combinations_that_do_not_exist(stage: int, precision: str, accumulation: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stages_to_try(stage, precision, accumulation)


def test_auto_tries_the_stages_that_the_other_arguments_allow() -> None:
    assert stages_to_try("auto", "fp32", "shared") == [0, 1, 2, 3]
    assert stages_to_try("auto", "fp16", "shared") == [0, 1, 2]
    assert stages_to_try("auto", "bf16", "per_rank") == [0, 1]
    assert stages_to_try(2, "fp16", "shared") == [2]
