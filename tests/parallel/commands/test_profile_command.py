"""``colossal-hetero profile`` starts ranks, each in a process, that measure a model by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from colossal_hetero.commands.profile import profile
from colossal_hetero.planner.profile.layer_profile import load_model_profile


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (["timm:vit_tiny_patch16_224", "--set", "depth=3", "--set", "embed_dim=48", "--image-size", "32"], 3),
        (["hf:gpt2", "--set", "n_layer=2", "--set", "n_embd=48", "--set", "vocab_size=99", "--sequence", "16"], 2),
    ],
)
def test_ranks_measure_a_named_model(tmp_path: Path, model: list[str], blocks: int) -> None:
    out = tmp_path / "p.json"
    short = ["--micro-batch", "1,2", "--seconds", "0", "--nproc", "2", "--out", str(out)]
    result = CliRunner().invoke(profile, ["--model", *model, *short])
    assert result.exit_code == 0, result.output
    written = load_model_profile(out)
    assert written.blocks == blocks and written.name == model[0] and written.source == "measured"
    assert len(written.rank_devices) == 2 and set(written.rank_devices) <= {"cpu", "cpu-2"}
    assert written.micro_batches("cpu", 1) == (1, 2)
    assert min(written.times[0].forward_seconds) > 0
    assert json.loads(out.read_text())["state_factor"] == 4.0
