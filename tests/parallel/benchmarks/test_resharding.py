"""One of the benchmark's pairs of plans, with a small model: saved and loaded by another number of ranks."""

from __future__ import annotations

from benchmarks.checkpoint.resharding import MAX_READ_SHARE, Pair, Plan, reshard


def test_a_checkpoint_is_loaded_under_another_plan() -> None:
    outcome = reshard(Pair("llama", Plan(dp=3, zero=1), Plan(tp=2, dp=2, zero=1), "bf16"), {})
    assert outcome.tensors and not outcome.different
    assert outcome.read_share <= MAX_READ_SHARE
