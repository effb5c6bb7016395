"""The ZeRO example end to end: what it trains, what it writes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from examples.common.options import UsageError, slowdowns
from examples.zero.options import check_options, parse_options
from tests.support.comparison_examples import compared

SMALL = "--hidden 16 --depth 1 --heads 2 --patch 16 --global-batch 128 --epochs 1"


def test_both_ways_have_the_same_losses_at_every_stage(tmp_path):
    """The slow rank is measured and then gets fewer images."""
    file = tmp_path / "summary.json"
    flags = f"{SMALL} --straggler 1:5 --straggler-means repeat --summary {file}"
    summaries, shown = compared("zero", 2, *[f"{flags} --stage {stage}" for stage in range(4)])
    for part in ("rank 1 slowed × 5 by", "An iteration, by rank", "Both ways", "as equal ones, on the same images"):
        assert shown.count(part) == 4
    assert shown.splitlines()[-1] == f"Summary: {file}"
    assert json.loads(file.read_text()) == summaries[-1]
    for stage, summary in enumerate(summaries):
        assert summary["slowed"] == {"ranks": {"1": 5}, "means": "repeat"} and summary["world_size"] == 2
        uniform, exact = summary["trainings"]
        assert (uniform["method"], exact["method"]) == ("uniform", "exact")
        assert uniform["stage"] == exact["stage"] == stage
        assert [rank["samples"] for rank in uniform["ranks"]] == [64, 64]
        shares = [rank["samples"] for rank in exact["ranks"]]
        assert sum(shares) == 128 and shares[0] > shares[1]
        assert len(exact["loss"]) == exact["iterations"] == 1438 // 128 and len(exact["accuracy"]) == 1
        # The order of additions changes only the rounding.
        assert exact["loss"] == pytest.approx(uniform["loss"], rel=1e-3)
        assert summary["largest_loss_difference"] < 1e-2
        assert exact["accuracy"] == pytest.approx(uniform["accuracy"], abs=0.02)
        assert summary["speedup"] == pytest.approx(
            uniform["iteration_seconds"]["median"] / exact["iteration_seconds"]["median"]
        )


def test_a_profile_is_written_and_used_again(tmp_path):
    path = tmp_path / "profile.json"
    (first, second), _ = compared("zero", 2, *[f"{SMALL} --method exact --straggler none --profile {path}"] * 2)
    profile = json.loads(path.read_text())
    assert profile["stage"] == 1 and len(profile["ranks"]) == 2
    assert first["speedup"] is None and first["slowed"] is None and len(second["trainings"]) == 1
    assert second["trainings"][0]["boost_seconds"] < first["trainings"][0]["boost_seconds"]
    with pytest.raises(UsageError, match="made with --stage 1, not 2"):
        check_options(parse_options(f"--stage 2 --profile {path}".split()), 2)
    with pytest.raises(UsageError, match="is of 2 ranks, not 3"):
        check_options(parse_options(f"--profile {path}".split()), 3)


def test_by_default_rank_1_is_slow_if_there_is_more_than_one_rank():
    assert slowdowns(parse_options([]).straggler, 1) == {}
    assert slowdowns(parse_options([]).straggler, 2) == {1: 4}
    assert slowdowns(parse_options(["--straggler", "0:2,1:1"]).straggler, 2) == {0: 2}
