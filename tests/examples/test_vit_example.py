"""The ViT and the language example end to end: what they train and what they write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from examples.language.options import parse_options as parse_gpt
from examples.language.text import TextPieces, load_text
from examples.vit.model import build_chosen_vit
from examples.vit.options import parse_options
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


def _train(lines: list[str]) -> list[dict[str, Any] | None]:
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
    summaries, folder = two_ranks
    assert len(summaries["off"]["loss"]) == 6
    assert summaries["off"]["loss"] == summaries["colossalai"]["loss"]
    assert summaries["off"]["accuracy"] == summaries["colossalai"]["accuracy"]
    assert set(summaries["colossalai"]) == SUMMARY_KEYS
    assert all(summaries["colossalai"][name] is None for name in ("ranks", "bound", "what_if"))
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


def test_a_straggler_is_resized_and_the_model_still_learns(two_ranks):
    summary = two_ranks[0]["resize"]
    # α·γ = 0.8 · ½ of all layers, in whole columns: no weight varies less than the threshold yet.
    assert [rank["resized"] for rank in summary["ranks"]] == [0.0, pytest.approx(0.4, abs=0.02)]
    assert sum(summary["loss"][-10:]) < sum(summary["loss"][:10])
    assert summary["bound"]["ideal_ratio"] == pytest.approx(2 / (1 + 1 / 40))
    assert summary["bound"]["measured_ratio"] > 0
    # Its checkpoint is the whole model.
    weights = torch.load(two_ranks[1] / "saved" / "model.pt", weights_only=True)
    build_chosen_vit(parse_options(SMALL.split()), classes=10).load_state_dict(weights)


def test_losses_do_not_depend_on_the_division_of_the_ranks(two_ranks):
    reference = two_ranks[0]["off"]
    lines = ("--pp 2 --tp 2 --steps 6", "--tp 2 --steps 6")
    for summary in (two_ranks[0]["pipeline"], *trained(4, *lines)):
        assert summary["loss"] == pytest.approx(reference["loss"], rel=1e-3)
        assert summary["accuracy"] == pytest.approx(reference["accuracy"], abs=0.02)
        assert len(summary["ranks"]) == summary["world_size"]


def test_the_command_starts_ranks_and_prints_the_results(tmp_path):
    """Only this example trains as a command. ``test_launch`` tests how the commands of all examples start."""
    path = tmp_path / "summary.json"
    arguments = [*SMALL.split(), *f"--steps 3 --balance resize --straggler 1:2 --summary {path}".split()]
    text = forked_output(REPOSITORY / "examples" / "vit" / "train.py", *arguments)
    assert text.splitlines()[-1] == f"Summary: {path}"
    assert json.loads(path.read_text())["iterations"] == 3
    assert "An iteration took" in text and "Unbalanced it would" in text and "Accuracy on held-out images" in text
    assert "arning" not in text and "INFO" not in text


SMALL_GPT = "--hidden 32 --depth 1 --heads 4 --context 16 --batch-size 16 --lr 1e-2 --steps 20"
LINES = ("--plugin colossalai", "", "--balance auto --straggler 1:4", "--tp 1")


def _train_gpt() -> tuple[list[dict[str, Any] | None], bool]:
    """Train once per line. Returns the summaries, and whether the prediction of a byte depends on later bytes."""
    import torch
    from colossalai.booster import Booster

    from colossal_hetero import HeteroHybridParallelPlugin
    from examples.language import text
    from examples.language import train as example

    with patch.object(text, "HELD_OUT_SHARE", 0.005):  # a tenth of the default, to shorten the evaluation
        summaries = [example.train(parse_gpt(f"{SMALL_GPT} {line}".split()), quiet=True) for line in LINES]
    options = parse_gpt(SMALL_GPT.split())
    plugin = HeteroHybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
    model, *_ = Booster(plugin=plugin).boost(example.build_model(options))
    tokens = torch.arange(16)[None]
    other = tokens.clone()
    other[0, 10] = 99
    with torch.no_grad():
        first, second = (model(**example.inputs(each)).logits for each in (tokens, other))
    assert not torch.equal(first[:, 10:], second[:, 10:])
    return summaries, not torch.equal(first[:, :10], second[:, :10])


def test_the_model_learns_and_balancing_does_not_change_the_losses() -> None:
    (summaries, looks_ahead), _ = run_ranks(2, _train_gpt)
    assert not looks_ahead
    colossalai, off, balanced, replicas = summaries
    assert off["loss"] == colossalai["loss"] and off["accuracy"] == colossalai["accuracy"]
    assert off["loss"][0] == pytest.approx(5.5, abs=0.2)  # log 256
    assert sum(off["loss"][-5:]) / 5 < 4.0
    for summary in (balanced, replicas):
        assert summary["loss"] == pytest.approx(off["loss"], rel=2e-3)
        assert len(summary["ranks"]) == 2
    assert 0.1 < off["accuracy"][-1] < 0.6


EPOCHS = SMALL_GPT.replace("--steps 20", "--epochs 2")
PIECES = 64  # of text, in an epoch


def _little_text(context: int) -> tuple[TextPieces, TextPieces]:
    found = load_text(context)
    for pieces in found:
        pieces.tokens = pieces.tokens[:PIECES]
    return found


def _train_with_checkpoints(folder: str) -> tuple[list[float], list[float]]:
    """The losses of the second epoch: without an interruption, and resumed with another tensor-parallel degree."""
    import torch.distributed as dist

    from examples.language import train as example

    with patch.object(example, "load_text", _little_text):
        whole = example.train(parse_gpt(f"{EPOCHS} --save-in {folder}".split()), quiet=True)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(max(Path(folder).glob("step-*")))  # that of the second epoch
        dist.barrier()
        resumed = example.train(parse_gpt(f"{EPOCHS} --save-in {folder} --resume --tp 1".split()), quiet=True)
    if whole is None or resumed is None:
        return [], []
    return whole["loss"], resumed["loss"]


def test_a_run_resumes_with_another_tensor_parallel_degree(tmp_path: Path) -> None:
    (whole, resumed), _ = run_ranks(2, _train_with_checkpoints, str(tmp_path))
    assert len(whole) == 2 * len(resumed) == 2 * PIECES // 16
    assert resumed == pytest.approx(whole[len(resumed) :], rel=1e-4)
    # Pieces of text do not overlap.
    train, test = load_text(64)
    assert len(train) > 15 * len(test) > 0
    assert train[0].shape == (64,) and int(train.tokens.max()) < 256
    assert bytes(train[0].tolist()).isascii()
