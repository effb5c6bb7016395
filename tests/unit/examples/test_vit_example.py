"""The ViT example's command line, its checks and its report, without ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.config import PAPER_METHODS
from colossal_hetero.balance.report import IterationRecord, RankRecord
from colossal_hetero.profiling.named_profile import build_model
from examples.common.balancing_report import BalancingReport
from examples.common.images import DataInfo, find_data
from examples.common.measurements import Measurements, summarize
from examples.common.options import UsageError
from examples.common.tensor_parallel import Layout
from examples.vit.model import build_chosen_vit, check_model
from examples.vit.options import VitOptions, check_options, parse_options


def options(line: str = "") -> VitOptions:
    return parse_options(line.split())


def make_folder(root: Path, train: dict[str, int], test: dict[str, int], size: int = 32) -> Path:
    """Make folders of images of one color; ``train`` and ``test`` give the number of images by class."""
    for split, classes in (("train", train), ("test", test)):
        for number, (name, count) in enumerate(classes.items()):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (size, 2 * size), (40 * number, 10 * index, 0)).save(folder / f"{index}.png")
    return root


@pytest.mark.parametrize(
    ("line", "world_size", "layout"),
    [
        ("", 2, Layout(tp=2, pp=1, dp=1, local_batch=64, microbatches=1)),
        ("--pp 2", 4, Layout(tp=2, pp=2, dp=1, local_batch=64, microbatches=4)),
        ("--pp 2 --batch-size 63", 2, Layout(tp=1, pp=2, dp=1, local_batch=63, microbatches=3)),
        ("--tp 2", 4, Layout(tp=2, pp=1, dp=2, local_batch=32, microbatches=1)),
    ],
)
def test_ranks_are_divided(line, world_size, layout):
    assert check_options(options(line), world_size) == layout
    assert check_options(options("--tp 2"), 4).tp_groups == [[0, 1], [2, 3]]  # consecutive ranks


def test_the_balancing_flags_reach_the_plugin():
    """All modes take all flags; what a mode does not use is left out."""
    for mode in ("off", "resize", "migrate", "semi", "auto"):
        chosen = options(f"--balance {mode} --migration scatter-gather --max-resize 0.25 --seed 3")
        migration = {"migration": "scatter-gather"} if mode in ("migrate", "semi", "auto") else {}
        pruning = {"pruning": Pruning(seed=3)} if mode in ("resize", "semi", "auto") else {}
        assert chosen.balance_config() == BalanceConfig(mode=mode, max_resize=0.25, **migration, **pruning)
        # Without the flags the defaults of the package apply.
        assert options(f"--balance {mode}").balance_config().rules == BalanceConfig(mode=mode).rules
    for name in PAPER_METHODS:
        seed = {} if name == "mig" else {"seed": 3}
        assert options(f"--paper {name} --seed 3").balance_config() == BalanceConfig.paper(name, **seed)


def test_models_that_cannot_be_trained_are_rejected_and_others_are_adapted():
    for line, tp, says in (
        ("--model vit_no_such", 2, "timm has no such model"),
        ("--model resnet18", 2, "VisionTransformer"),
        ("--model swin_tiny_patch4_window7_224", 1, "VisionTransformer"),
        ("--model vit_tiny_patch16_224", 2, "--tp 2 does not divide the 3 heads"),
        ("--model vit_base_patch14_dinov2", 2, "patch size of 14"),
    ):
        with pytest.raises(UsageError, match=says):
            check_model(options(line), Layout(tp, 1, 1, 64, 1))
    chosen = options("--model vit_tiny_patch16_224 --patch 8")  # adapted to the image size
    check_model(chosen, Layout(3, 1, 1, 64, 1))
    assert build_chosen_vit(chosen, classes=5)(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    for name, billions in (("vit-1b", 1.2), ("vit-3b", 2.7)):  # those of SEMI
        chosen = options(f"--model {name}")
        check_options(chosen, 8)
        with torch.device("meta"):
            model = build_chosen_vit(chosen, classes=10)
        assert sum(each.numel() for each in model.parameters()) == pytest.approx(billions * 1e9, rel=0.02)
        assert len(model.pos_embed[0]) == 64
        # ``colossal-hetero profile --model`` builds the same.
        shapes, ours = build_model(name, device="meta").model.state_dict(), model.state_dict()
        assert {key: value.shape for key, value in shapes.items()} == {key: value.shape for key, value in ours.items()}


def test_unusable_data_is_reported(tmp_path):
    for number, (train, test, says) in enumerate(
        (
            ({}, {"cat": 1}, "no train/"),
            ({"cat": 1, "dog": 0}, {"cat": 1, "dog": 1}, "without images"),
            ({"cat": 1, "dog": 1}, {"cat": 1, "cow": 1}, "cow, dog"),
            ({"cat": 3}, {"cat": 1}, "at least two"),
            ({"cat": 3, "dog": 3}, {"cat": 1, "dog": 1}, "--batch-size 64"),
        )
    ):
        root = make_folder(tmp_path / str(number), train, test)
        with pytest.raises(UsageError, match=says):
            find_data(options(f"--data folder --data-dir {root}"), 64)
    for line, says in (
        ("--data folder", "needs --data-dir"),
        ("--data folder --data-dir /nowhere", "not a directory"),
        ("--data cifar10", "needs --data-dir"),
        ("--data cifar10 --data-dir /nowhere", "download it"),
        ("--data digits --data-dir /nowhere", "is not used"),
        ("--batch-size 1439", "1438 training images"),
    ):
        with pytest.raises(UsageError, match=says):
            chosen = options(line)
            find_data(chosen, chosen.batch_size)


def rank_record(rank: int, seconds: float, equal_seconds: float, **others: Any) -> RankRecord:
    times = dict(work_seconds=seconds, matmul_seconds=seconds, equal_work_seconds=equal_seconds)
    times |= dict(equal_matmul_seconds=equal_seconds, wait_seconds=0.0, communication_seconds=0.0, resized=0.0)
    return RankRecord(rank=rank, **(times | others))


def measured(line: str, iterations: int, note: str = "", **slow: Any) -> Measurements:
    """A run in which rank 1 takes three times as long and prunes half of its work; ``slow`` changes its record."""
    chosen = options(line)
    measurements = Measurements(chosen, check_options(chosen, 2), chosen.stragglers(2))
    records = []
    for number in range(iterations):
        measurements.iteration(0, 0.2)
        ranks = (
            rank_record(0, 0.1, 0.1, wait_seconds=0.05, communication_seconds=0.05),
            rank_record(1, 0.15, 0.3, **(dict(resized=0.5, relative_score=1 / 3) | slow)),
        )
        records.append(IterationRecord(number, ranks, plan_changed=False, note=note))
    measurements.epoch([2.0] * iterations, 0.5, records)
    return measurements


def printed_report(measurements: Measurements, capsys, monkeypatch) -> str:
    """What the report prints at the end of an epoch and of the run."""
    monkeypatch.setenv("COLUMNS", "140")
    report = BalancingReport(measurements.options, measurements.layout, plugin=None, baseline="chance is 10%")
    report.measurements = measurements
    report.start("ViT", str(DataInfo(100, 50, 10)), epochs=1, iterations=4)
    report.print_epoch(0)
    report.print_result(summarize(measurements, [1, 1]))
    return capsys.readouterr().out


def test_the_result_shows_the_time_that_balancing_saved(capsys, monkeypatch):
    text = printed_report(measured("--balance resize --straggler 1:3", 8), capsys, monkeypatch)
    for words in (
        *("rank 1 resized 50%\n", "slowed", "× 3"),
        "An iteration took 200 ms (median), of which ranks waited 25 ms for slower ones (mean over ranks).",
        "Unbalanced it would have taken 300 ms (2.0 times as long: balancing saved 150 ms).",
        "With all ranks as fast as the fastest it would have taken 100 ms;",
        "with nothing pruned and the work spread ideally, 150 ms.",
        "Accuracy on held-out images: 50.0% (chance is 10%).",
    ):
        assert words in text, words
    assert "migrated" not in text and "received" not in text
    assert re.search(r"vs fastest +vs own best", text) and re.search(r"0\.33 +1\.00", text)
