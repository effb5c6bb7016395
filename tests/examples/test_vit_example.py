"""The ViT example end to end: what it trains and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_python import forked_output
from tests.support.harness import run_ranks
from tests.support.paths import REPOSITORY

SMALL = "--hidden 32 --depth 2 --heads 4 --patch 8 --batch-size 32"

SUMMARY_KEYS = {
    *("schema", "args", "world_size", "iterations", "warmup_iterations", "iteration_seconds", "samples_per_second"),
    *("loss", "accuracy", "peak_memory_bytes", "ranks", "bound", "what_if"),
}
RANK_KEYS = {"rank", "work_seconds", "matmul_seconds", "wait_seconds"}
RANK_KEYS |= {"resized", "migrated", "resharded", "received"}


# With ranks that the test starts ----------------------------------------------------------------------------


def _train(lines: list[str]) -> list[dict[str, Any] | None]:
    from examples.vit.options import parse_options
    from examples.vit.train import train

    return [train(parse_options(f"{SMALL} {line}".split()), quiet=True) for line in lines]


def trained(ranks: int, *lines: str) -> list[dict[str, Any]]:
    """Train once per line on ``ranks`` ranks. Returns the summaries, which only rank 0 has."""
    results = run_ranks(ranks, _train, list(lines))
    assert all(summary is None for summaries in results[1:] for summary in summaries)
    return results[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[dict[str, dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("vit")
    lines = {
        "colossalai": "--plugin colossalai --steps 6",
        "off": f"--steps 6 --summary {folder}/off.json",
        "resize": "--paper zero-pridiff-e --straggler 1:40 --lr 5e-3 --batch-size 64 --steps 30 "
        f"--checkpoint {folder}/saved",
        "pipeline": "--pp 2 --steps 6",
    }
    return dict(zip(lines, trained(2, *lines.values()), strict=True)), folder


def test_without_balancing_losses_equal_those_of_colossal_ai(two_ranks):
    summaries, _ = two_ranks
    assert len(summaries["off"]["loss"]) == 6
    assert summaries["off"]["loss"] == summaries["colossalai"]["loss"]
    assert summaries["off"]["accuracy"] == summaries["colossalai"]["accuracy"]


def test_contents_of_the_summary_file(two_ranks):
    summaries, folder = two_ranks
    summary = json.loads((folder / "off.json").read_text())
    assert summary == summaries["off"]
    assert set(summary) == SUMMARY_KEYS
    assert summary["schema"] == 1 and summary["world_size"] == 2 and summary["args"]["hidden"] == 32
    assert summary["iterations"] == 6 and len(summary["accuracy"]) == 1
    assert 0 < summary["iteration_seconds"]["p10"] <= summary["iteration_seconds"]["median"]
    assert len(summary["peak_memory_bytes"]) == 2 and min(summary["peak_memory_bytes"]) > 0
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert all(set(rank) == RANK_KEYS and rank["work_seconds"] > 0 for rank in summary["ranks"])
    assert summary["bound"] is None


def test_colossal_ai_s_plugin_has_no_rank_times(two_ranks):
    summaries, _ = two_ranks
    assert set(summaries["colossalai"]) == SUMMARY_KEYS
    assert all(summaries["colossalai"][name] is None for name in ("ranks", "bound", "what_if"))


def test_a_straggler_is_resized_and_the_model_still_learns(two_ranks):
    summary = two_ranks[0]["resize"]
    # α·γ = 0.8 · ½ of all layers, in whole columns: no weight varies less than the threshold yet.
    assert [rank["resized"] for rank in summary["ranks"]] == [0.0, pytest.approx(0.4, abs=0.02)]
    assert sum(summary["loss"][-10:]) < sum(summary["loss"][:10])
    assert summary["bound"]["ideal_ratio"] == pytest.approx(2 / (1 + 1 / 40))
    assert summary["bound"]["measured_ratio"] > 0


def test_the_checkpoint_is_the_whole_model(two_ranks):
    import torch

    from examples.vit.model import build_chosen_vit
    from examples.vit.options import parse_options

    weights = torch.load(two_ranks[1] / "saved" / "model.pt", weights_only=True)
    build_chosen_vit(parse_options(SMALL.split()), classes=10).load_state_dict(weights)


def test_losses_do_not_depend_on_the_division_of_the_ranks(two_ranks):
    reference = two_ranks[0]["off"]
    lines = ("--pp 2 --tp 2 --steps 6", "--tp 2 --steps 6")
    for summary in (two_ranks[0]["pipeline"], *trained(4, *lines)):
        assert summary["loss"] == pytest.approx(reference["loss"], rel=1e-3)
        assert summary["accuracy"] == pytest.approx(reference["accuracy"], abs=0.02)
        assert len(summary["ranks"]) == summary["world_size"]


# With the command that a user runs --------------------------------------------------------------------------


def test_the_command_starts_ranks_and_prints_the_results(tmp_path):
    """Only this example trains as a command. ``test_launch`` tests how the commands of all examples start."""
    path = tmp_path / "summary.json"
    arguments = [*SMALL.split(), *f"--steps 3 --balance resize --straggler 1:2 --summary {path}".split()]
    text = forked_output(REPOSITORY / "examples" / "vit" / "train.py", *arguments)
    assert text.splitlines()[-1] == f"Summary: {path}"
    assert json.loads(path.read_text())["iterations"] == 3
    assert "An iteration took" in text and "Unbalanced it would" in text and "Accuracy on held-out images" in text
    assert "arning" not in text and "INFO" not in text
