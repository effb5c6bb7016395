"""The ViT, language, ZeRO and pipeline examples end to end: what they train, write and refuse."""

import importlib
import io
import json
import os
import shutil
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.planner.cost.plan import load_plan
from colossal_hetero.planner.profile.layer_profile import load_profile
from colossal_hetero.profiling import device_profiler
from examples.common.options import UsageError, slowdowns
from examples.language.options import parse_options as parse_gpt
from examples.language.text import TextPieces, load_text
from examples.vit.model import build_chosen_vit
from examples.vit.options import parse_options
from examples.zero.options import check_options
from examples.zero.options import parse_options as parse_zero
from tests.support.forked_python import forked_output
from tests.support.harness import run_ranks
from tests.support.paths import REPOSITORY
from tests.support.random_examples import IS_THOROUGH

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
    summaries, of_rank_1 = run_ranks(2, _train, list(lines.values()))
    assert not any(of_rank_1)
    return dict(zip(lines, summaries, strict=True)), folder


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
    assert summaries["pipeline"]["loss"] == pytest.approx(summary["loss"], rel=1e-3)
    assert len(summaries["pipeline"]["ranks"]) == 2


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


SMALL_ZERO = "--hidden 16 --depth 1 --heads 2 --patch 16 --global-batch 128 --epochs 1"


def _compare(example: str, lines: list[str]) -> tuple[list[dict[str, Any] | None], str]:
    parse = importlib.import_module(f"examples.{example}.options").parse_options
    module = importlib.import_module(f"examples.{example}.train")
    with ExitStack() as stack:
        # The launcher sets this for ranks of one machine. With it, both ways of training use the same profile.
        stack.enter_context(patch.dict(os.environ, LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"]))
        # Tests look for a slow rank, so they need times that are roughly right, in less time than users.
        for owner, name, value in (
            (device_profiler, "MIN_SECONDS", 0.05),
            (device_profiler, "REPEATS", 3),
            (device_profiler, "WINDOW_SECONDS", 0.02),
        ):
            stack.enter_context(patch.object(owner, name, value))
        if example == "pipeline":  # which measures each layer once
            shorter = partial(module.profile_layers, min_seconds=0.0)
            stack.enter_context(patch.object(module, "profile_layers", shorter))
        shown = stack.enter_context(redirect_stdout(io.StringIO()))
        return [module.compare(parse(line.split())) for line in lines], shown.getvalue()


def compared(example: str, ranks: int, *lines: str) -> tuple[list[dict[str, Any]], str]:
    """Run an example once per command line: the summaries of rank 0, and the text that it printed."""
    (summaries, shown), *others = run_ranks(ranks, _compare, example, list(lines))
    assert all(summary is None for found, _ in others for summary in found) and not any(text for _, text in others)
    return [summary for summary in summaries if summary is not None], shown


def check_trainings(summary: dict[str, Any], images: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both ways of training in a summary, whose losses and accuracies are equal up to rounding."""
    uniform, fitted = summary["trainings"]
    assert len(fitted["loss"]) == fitted["iterations"] == 1438 // images and len(fitted["accuracy"]) == 1
    assert fitted["loss"] == pytest.approx(uniform["loss"], rel=1e-3)
    assert fitted["accuracy"] == pytest.approx(uniform["accuracy"], abs=0.02)
    assert summary["largest_loss_difference"] < 1e-2 and summary["world_size"] == 2
    took = [training["iteration_seconds"]["median"] for training in (uniform, fitted)]
    assert summary["speedup"] == pytest.approx(took[0] / took[1])
    return uniform, fitted


def test_both_ways_have_the_same_losses_at_every_stage(tmp_path):
    """The slow rank is measured and then gets fewer images."""
    file, path = tmp_path / "summary.json", tmp_path / "profile.json"
    flags = f"{SMALL_ZERO} --straggler 1:5 --straggler-means repeat --summary {file}"
    again = [f"{SMALL_ZERO} --method exact --straggler none --profile {path}"] * 2
    stages = (0, 1, 2, 3) if IS_THOROUGH else (1, 3)
    (first, second, *summaries), shown = compared("zero", 2, *again, *[f"{flags} --stage {stage}" for stage in stages])
    for part in ("rank 1 slowed × 5 by", "An iteration, by rank", "Both ways", "as equal ones, on the same images"):
        assert shown.count(part) >= len(stages), part
    assert shown.splitlines()[-1] == f"Summary: {file}"
    assert json.loads(file.read_text()) == summaries[-1]
    for stage, summary in zip(stages, summaries, strict=True):
        assert summary["slowed"] == {"ranks": {"1": 5}, "means": "repeat"}
        uniform, exact = check_trainings(summary, 128)
        assert (uniform["method"], exact["method"]) == ("uniform", "exact")
        assert uniform["stage"] == exact["stage"] == stage
        assert [rank["samples"] for rank in uniform["ranks"]] == [64, 64]
        shares = [rank["samples"] for rank in exact["ranks"]]
        assert sum(shares) == 128 and shares[0] > shares[1]
    # A profile is written and used again.
    assert json.loads(path.read_text())["stage"] == 1 and len(json.loads(path.read_text())["ranks"]) == 2
    assert first["speedup"] is None and first["slowed"] is None and len(second["trainings"]) == 1
    assert second["trainings"][0]["boost_seconds"] < first["trainings"][0]["boost_seconds"]
    for line, ranks, words in (("--stage 2", 2, "made with --stage 1, not 2"), ("", 3, "is of 2 ranks, not 3")):
        with pytest.raises(UsageError, match=words):
            check_options(parse_zero(f"{line} --profile {path}".split()), ranks)
    # By default, rank 1 is slow if there is more than one rank.
    assert [slowdowns(parse_zero([]).straggler, ranks) for ranks in (1, 2)] == [{}, {1: 4}]
    assert slowdowns(parse_zero(["--straggler", "0:2,1:1"]).straggler, 2) == {0: 2}


SMALL_PIPELINE = "--hidden 32 --depth 6 --heads 2 --patch 16 --global-batch 256 --micro-batch 64 --epochs 1"


def test_both_ways_have_the_same_losses_and_the_slow_rank_gets_fewer_blocks(tmp_path):
    paths = {name: tmp_path / f"{name}.json" for name in ("summary", "plan", "profile")}
    outputs = " ".join(f"--{name} {path}" for name, path in paths.items())
    flags = f"{SMALL_PIPELINE} --straggler 1:8 --straggler-means repeat {outputs} --plot {tmp_path / 'plan.png'}"
    # One block is best for the slow rank if it is measured to be at least 2.5 times slower. It is slowed 8 times, but
    # times that are measured on a busy machine may differ by more than that.
    unequal = f"{SMALL_PIPELINE} --micro-batch 16 --way replicas --straggler 1:4 --straggler-means repeat"
    again = f"{SMALL_PIPELINE} --way planned --straggler 1:8 --straggler-means repeat --profile {paths['profile']}"
    (summary, replicas, reused), shown = compared("pipeline", 2, flags, unequal, again)
    words = ("ViT, 32 wide, 6 deep", "rank 1 slowed × 8", "uniform: tp 1", "planned: tp 1", "Both ways", "epoch 1/1")
    assert all(text in shown for text in words), shown
    assert "Any replicas t" in shown  # which is faster depends on what else the machine does
    # Both plans of replicas get the same global batches, and every rank has a place in them.
    equal, free = replicas["trainings"]
    assert (equal["way"], free["way"]) == ("equal", "any")
    assert sorted(stage["rank"] for stage in free["stages"]) == [0, 1]
    assert free["loss"] == pytest.approx(equal["loss"], rel=1e-3)
    assert free["accuracy"] == pytest.approx(equal["accuracy"], abs=0.02)
    assert json.loads(paths["summary"].read_text()) == summary
    assert summary["slowed"] == {"ranks": {"1": 8}, "means": "repeat"}
    uniform, planned = check_trainings(summary, 256)
    assert (uniform["way"], planned["way"]) == ("uniform", "planned")
    assert [stage["blocks"] for stage in uniform["stages"]] == [[0, 3], [3, 6]]
    blocks = {stage["rank"]: stage["blocks"][1] - stage["blocks"][0] for stage in planned["stages"]}
    assert blocks[0] + blocks[1] == 6 and blocks[1] < 3
    plan = load_plan(paths["plan"])
    assert plan.symmetric and plan.world_size == 2 and plan.blocks == 6
    profile = load_profile(paths["profile"])
    assert profile.rank_devices == ("cpu", "cpu-2") and profile.blocks == 6
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert reused["profile_seconds"] < summary["profile_seconds"]
    assert reused["speedup"] is None and [each["way"] for each in reused["trainings"]] == ["planned"]
