"""``colossal-hetero profile`` measures a model, given by its name, on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

from colossal_hetero.planner.profile.layer_profile import load_profile
from tests.support.forked_python import forked_output

VIT = ["timm:vit_tiny_patch16_224", "--set", "depth=3", "--set", "embed_dim=48", "--image-size", "32"]
GPT = ["hf:gpt2", "--set", "n_layer=2", "--set", "n_embd=48", "--set", "vocab_size=99", "--sequence", "16"]


def arguments(model: list[str], out: Path) -> list[str]:
    command = ["-m", "colossal_hetero.cli.main", "profile", "--model", *model]
    return [*command, "--micro-batch", "1,2", "--seconds", "0", "--nproc", "2", "--out", str(out)]


def test_ranks_measure_a_named_model(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    shown = forked_output(*arguments(VIT, out))
    written = load_profile(out)
    assert (written.blocks, written.name, written.source) == (3, VIT[0], "measured")
    assert len(written.rank_devices) == 2 and set(written.rank_devices) <= {"cpu", "cpu-2"}
    assert written.micro_batches("cpu", 1) == (1, 2)
    assert min(written.times[0].forward_seconds) > 0
    assert json.loads(out.read_text())["state_factor"] == 4.0
    assert f"{out}: layers of {VIT[0]}, measured" in shown.replace("\n", "")


def test_tensor_parallel_degrees_are_measured_in_one_profile(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    shown = forked_output(*arguments(GPT, out), "--tp", "1,2")
    written = load_profile(out)
    assert (written.blocks, written.name) == (2, GPT[0])
    alone, shared = written.sizes[0], written.sizes[-1]
    if len(set(written.rank_devices)) > 1:  # on a busy machine the two ranks may seem unequal
        assert "tensor parallel 2: groups of unequal devices are left out: ranks 0 to 1 are cpu and cpu-2" in shown
        return
    assert written.tensor_parallel_degrees("cpu") == (1, 2) and written.micro_batches("cpu", 2) == (1, 2)
    # qkv, the projection and the MLP are halved; biases of the row-parallel layers and the norms are not.
    width, four = 48, 4
    whole = four * (12 * width * width + 13 * width)
    assert alone.parameter_bytes[1] == whole
    assert shared.parameter_bytes[1] == four * (6 * width * width + (3 + 4) * width // 2 + 6 * width)
    assert shared.output_bytes == alone.output_bytes


def test_one_degree_alone(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    forked_output(*arguments(VIT[:3] + VIT[5:] + ["--set", "num_heads=2"], out), "--tp", "2")
    written = load_profile(out)
    assert written.tensor_parallel_degrees("cpu") == (2,) and written.rank_devices == ("cpu", "cpu")
