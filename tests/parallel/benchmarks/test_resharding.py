"""Two of the benchmark's pairs of plans, with small models: saved and loaded by other numbers of ranks."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint.resharding import MAX_READ_SHARE, Pair, Plan, reshard


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(Pair("gpt2", Plan(tp=3), Plan(tp=2, pp=2)), id="degrees"),
        pytest.param(Pair("llama", Plan(dp=3, zero=1), Plan(tp=2, dp=2, zero=1), "bf16"), id="zero"),
    ],
)
def test_a_checkpoint_is_loaded_under_another_plan(pair: Pair) -> None:
    outcome = reshard(pair, {})
    assert outcome.tensors and not outcome.different
    assert outcome.read_share <= MAX_READ_SHARE
