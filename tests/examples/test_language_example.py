"""The language example: its losses and accuracy, its data, and the flags that it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from examples.language.options import parse_options
from examples.language.text import TextPieces, load_text
from tests.support.harness import run_ranks

SMALL = "--hidden 32 --depth 1 --heads 4 --context 16 --batch-size 16 --lr 1e-2 --steps 20"
LINES = (
    "--plugin colossalai",
    "",
    "--balance auto --straggler 1:4",
    "--tp 1",
)


def _train() -> tuple[list[dict[str, Any] | None], bool]:
    """Train once per line. Returns the summaries, and whether the prediction of a byte depends on later bytes."""
    import torch

    from examples.language import text
    from examples.language import train as example

    with patch.object(text, "HELD_OUT_SHARE", 0.005):  # a tenth of the default, to shorten the evaluation
        summaries = [example.train(parse_options(f"{SMALL} {line}".split()), quiet=True) for line in LINES]
    return summaries, _looks_ahead(example, torch)


def _looks_ahead(example: Any, torch: Any) -> bool:
    from colossalai.booster import Booster

    from colossal_hetero import HeteroHybridParallelPlugin

    options = parse_options(SMALL.split())
    plugin = HeteroHybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
    model, *_ = Booster(plugin=plugin).boost(example.build_model(options))
    tokens = torch.arange(16)[None]
    other = tokens.clone()
    other[0, 10] = 99
    with torch.no_grad():
        first, second = (model(**example.inputs(each)).logits for each in (tokens, other))
    assert not torch.equal(first[:, 10:], second[:, 10:])
    return not torch.equal(first[:, :10], second[:, :10])


def test_the_model_learns_and_balancing_does_not_change_the_losses() -> None:
    (summaries, looks_ahead), _ = run_ranks(2, _train)
    assert not looks_ahead
    colossalai, off, balanced, replicas = summaries
    assert off["loss"] == colossalai["loss"] and off["accuracy"] == colossalai["accuracy"]
    assert off["loss"][0] == pytest.approx(5.5, abs=0.2)  # log 256
    assert sum(off["loss"][-5:]) / 5 < 4.0
    for summary in (balanced, replicas):
        assert summary["loss"] == pytest.approx(off["loss"], rel=2e-3)
        assert len(summary["ranks"]) == 2
    assert 0.1 < off["accuracy"][-1] < 0.6


EPOCHS = "--hidden 32 --depth 1 --heads 4 --context 16 --batch-size 16 --lr 1e-2 --epochs 2"
PIECES = 64
"""Of text, in an epoch."""


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
        whole = example.train(parse_options(f"{EPOCHS} --save-in {folder}".split()), quiet=True)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(max(Path(folder).glob("step-*")))  # that of the second epoch
        dist.barrier()
        resumed = example.train(parse_options(f"{EPOCHS} --save-in {folder} --resume --tp 1".split()), quiet=True)
    if whole is None or resumed is None:
        return [], []
    return whole["loss"], resumed["loss"]


def test_a_run_resumes_with_another_tensor_parallel_degree(tmp_path: Path) -> None:
    (whole, resumed), _ = run_ranks(2, _train_with_checkpoints, str(tmp_path))
    assert len(whole) == 2 * len(resumed) == 2 * PIECES // 16
    assert resumed == pytest.approx(whole[len(resumed) :], rel=1e-4)


def test_pieces_of_text_do_not_overlap() -> None:
    train, test = load_text(64)
    assert len(train) > 15 * len(test) > 0
    assert train[0].shape == (64,) and int(train.tokens.max()) < 256
    assert bytes(train[0].tolist()).isascii()
