"""The flags of the examples: what cannot work is refused in one line, which names the flag and what would work."""

from __future__ import annotations

import importlib

import pytest

from examples.common.options import UsageError
from tests.support.paths import REPOSITORY


@pytest.mark.parametrize(
    ("example", "line", "ranks", "says"),
    [
        ("vit", "--tp 3", 3, ["--tp 3", "8 heads", "1, 2, 4, 8"]),
        ("vit", "--tp 3", 4, ["--tp 3", "4 ranks", "--nproc"]),
        ("vit", "--pp 3", 4, ["--pp 3", "4 ranks"]),
        ("vit", "--pp 4 --depth 2", 4, ["--pp 4", "has 2"]),
        ("vit", "--tp 8 --heads 12 --hidden 96", 8, ["--tp 8", "12 heads", "1, 2, 3, 4, 6, 12"]),
        ("vit", "--heads 7", 2, ["--heads 7", "--hidden"]),
        ("vit", "--patch 5", 2, ["--patch 5", "32", "1, 2, 4, 8, 16, 32"]),
        ("vit", "--batch-size 3 --tp 2", 4, ["--batch-size 3"]),
        ("vit", "--batch-size 0", 2, ["--batch-size 0", "at least 1"]),
        ("vit", "--lr nan", 2, ["--lr nan", "positive"]),
        ("vit", "--pp 2 --batch-size 7", 2, ["--batch-size 7", "--pp 2"]),
        ("vit", "--model vit_tiny_patch16_224 --hidden 64", 2, ["--hidden", "--model"]),
        ("vit", "--model vit-1b --depth 2", 2, ["--depth", "--model vit-1b"]),
        ("vit", "--model vit-3b --tp 9", 9, ["--tp 9", "48 heads of vit-3b"]),
        ("vit", "--paper zero-pri --balance auto", 2, ["--paper zero-pri", "--balance auto", "leave one out"]),
        ("vit", "--paper semi --tp 1", 2, ["--paper semi", "--tp 1"]),
        ("vit", "--balance resize --max-resize -0.1", 2, ["--max-resize -0.1", "[0, 1)"]),
        ("vit", "--paper zero-pridiff-e --max-resize 0.2", 2, ["resize_ratio=0.5", "--max-resize 0.2"]),
        ("vit", "--balance auto --tp 1", 2, ["--balance auto", "--tp 1"]),
        ("vit", "--summary /proc/all.json", 2, ["--summary /proc/all.json", "cannot be written"]),
        ("vit", "--straggler 2:4", 2, ["2:4", "rank 2", "0 to 1"]),
        ("vit", "--straggler 1:0.5", 2, ["0.5", "at least 1"]),
        ("vit", "--straggler fast", 2, ["fast", "RANK:FACTOR"]),
        ("vit", "--straggler 1:4 --plugin colossalai", 2, ["--plugin hetero --balance off"]),
        ("vit", "--straggler 0:4 --tp 1", 2, ["--tp 1"]),
        ("vit", "--balance resize --plugin colossalai", 2, ["--balance resize", "--plugin hetero"]),
        ("vit", "--balance resize --tp 1", 2, ["--balance resize", "--tp 1"]),
        ("vit", "--summary /nowhere/at/all.json", 2, ["/nowhere/at/all.json", "no directory /nowhere/at"]),
        ("vit", "--summary /proc", 2, ["--summary /proc", "is a directory"]),
        ("vit", "--checkpoint /proc/weights", 2, ["--checkpoint /proc/weights", "cannot be created"]),
        ("vit", "--migration ring", 2, ["ring"]),
        ("vit", "--paper zero", 2, ["zero-pri"]),
        ("vit", "--balance semi-random", 2, ["semi-random"]),
        ("vit", "--precision int8", 2, ["int8"]),
        ("vit", "--nproc two", 2, ["two"]),
        ("vit", "--no-such-flag", 2, ["--no-such-flag"]),
        # The language example shares the checks of layouts and balancing with that of ViT.
        ("language", "--heads 3", 2, ["--heads 3", "--hidden 256"]),
        ("language", "--tp 3", 3, ["--tp 3", "8 heads", "1, 2, 4, 8"]),
        ("language", "--context 1", 2, ["--context 1", "at least 2"]),
        ("language", "--balance auto --tp 1", 2, ["--balance auto", "--tp 1"]),
        ("language", "--resume", 2, ["--resume", "--save-in"]),
        ("language", "--save-in there --plugin colossalai", 2, ["--save-in there", "colossalai"]),
        ("zero", "--straggler 2:4", 2, ["--straggler 2:4", "no rank 2", "0 to 1"]),
        ("zero", "--straggler 1:2.5", 2, ["--straggler 1:2.5", "whole number", "2.5"]),
        ("zero", "--straggler 1:0", 2, ["--straggler 1:0", "1 or more"]),
        ("zero", "--straggler 1", 2, ["--straggler 1", "RANK:FACTOR"]),
        ("zero", "--stage 4", 2, ["--stage", "'4'"]),
        ("zero", "--method fastest", 2, ["--method", "fastest"]),
        ("zero", "--global-batch 0", 2, ["--global-batch 0", "at least 1"]),
        ("zero", "--epochs 0", 2, ["--epochs 0"]),
        ("zero", "--lr 0", 2, ["--lr 0", "positive"]),
        ("zero", "--patch 5", 2, ["--patch 5", "1, 2, 4, 8, 16, 32"]),
        ("zero", "--heads 3", 2, ["--heads 3", "--hidden 256"]),
        ("zero", "--precision fp16 --stage 3", 2, ["--precision fp16", "--stage 3"]),
        ("zero", "--stage auto --profile p.json", 2, ["--profile", "auto"]),
        ("zero", "--summary /nowhere/at/all.json", 2, ["--summary /nowhere/at/all.json", "no directory /nowhere/at"]),
        ("zero", "--profile /nowhere/at/all.json", 2, ["--profile /nowhere/at/all.json", "no directory /nowhere/at"]),
        ("zero", "--profile README.md", 2, ["--profile README.md", "JSON"]),
        # The pipeline example shares the checks of stragglers, training, sizes and files with that of ZeRO.
        ("pipeline", "--straggler 2:4", 2, ["--straggler 2:4", "no rank 2", "0 to 1"]),
        ("pipeline", "--micro-batch 7", 2, ["--micro-batch 7", "--global-batch 64", "1, 2, 4, 8, 16, 32, 64"]),
        ("pipeline", "--micro-batch 64", 2, ["--micro-batch 64", "1 micro-batch", "2 stages"]),
        ("pipeline", "--depth 1", 2, ["--depth 1", "2 stages", "--depth 2"]),
        ("pipeline", "", 1, ["two stages", "--nproc 2"]),
        ("pipeline", "--way uniform --plan x.json", 2, ["--plan", "--way planned"]),
        ("pipeline", "--plot plan.docx", 2, ["--plot plan.docx", ".png"]),
        ("pipeline", "--summary /nowhere/x.json", 2, ["--summary", "no directory /nowhere"]),
        ("pipeline", "--method best", 2, ["--method", "exact"]),
        ("pipeline", "--profile README.md", 2, ["--profile README.md", "JSON"]),
        ("elastic", "--kill node-1", 0, ["--kill", "NODE:STEP", "node-1:20"]),
        ("elastic", "--kill node-9:3", 0, ["node-9:3", "node-4"]),
        ("elastic", "--kill node-4:3", 0, ["--kill node-4:3", "does not run", "node-0"]),
        ("elastic", "--join node-1:3", 0, ["--join node-1:3", "runs already", "node-4"]),
        ("elastic", "--nodes 2 --kill node-0:3 --leave node-1:4", 0, ["--leave node-1:4", "last node"]),
        ("elastic", "--nodes 1", 0, ["--nodes 1", "2 to 5"]),
        ("elastic", "--micro-batch 7", 0, ["--micro-batch 7", "--global-batch 64"]),
        ("elastic", "--depth 1", 0, ["--depth 1", "--depth 2"]),
        ("elastic", "--precision bf16", 0, ["--precision", "fp64"]),
        ("elastic", "--plot plan.docx", 0, ["--plot plan.docx", ".png"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    example: str, line: str, ranks: int, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    module = importlib.import_module(f"examples.{example}.options")
    with pytest.raises(UsageError) as error:
        if example == "elastic":
            module.check_options(module.parse_demo_options(line.split()))
        else:
            module.check_options(module.parse_options(line.split()), ranks)
    message = str(error.value)
    assert "\n" not in message and all(text in message for text in says), message
