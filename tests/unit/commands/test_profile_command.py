"""``colossal-hetero profile`` and ``colossal-hetero estimate``: the files that they write, and their error messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colossal_hetero.planner.profile.layer_profile import load_profile
from tests.support import command_line

GPT = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocabulary", "100", "--sequence", "32"]


def test_an_estimate_is_written_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "estimate.json"
    arguments = [*GPT, "--device", "A100-40", "--device", "T4", "--tp", "1,2", "--micro-batch", "2,8"]
    result = command_line.run("estimate", *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    written = load_profile(out)
    assert written.devices == ("A100-40", "T4") and written.blocks == 4
    assert written.tensor_parallel_degrees("T4") == (1, 2) and written.micro_batches("T4", 2) == (2, 8)
    table = result.output
    assert table.count(" A100-40 ") == 4 and table.count(" T4 ") == 4
    assert f"{out}: layers of gpt-4x64, estimated from FLOP at 0.4" in table.replace("\n", "")


def test_an_estimate_of_any_device(tmp_path: Path) -> None:
    """Devices with their own speed, those of a cluster file, and a share of the speed for each kind."""
    out, cluster = tmp_path / "estimate.json", tmp_path / "cluster.toml"
    devices = ["--device", "W7900=122,48", "--device", "odd=61", "--device", "RTX-4090"]
    result = command_line.run("estimate", *GPT, *devices, "--efficiency", "odd=0.8", "--out", out)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "[kinds.W7900] memory_gb = 48, tflops = 122" in shown and "[kinds.odd] memory_gb = …, tflops = 61" in shown
    assert "0.4 (W7900), 0.8 (odd), 0.4 (RTX-4090) of nominal" in shown
    written = load_profile(out)
    known, odd = (written.costs(name, 1, 1).forward_seconds for name in ("W7900", "odd"))
    assert odd == pytest.approx(known)  # half as fast, and twice the share
    cluster.write_text(
        'schema = 1\n[kinds.mine]\nmemory_gb = 24\ntflops = 122\n[[clusters]]\nname = "x"\n[[clusters.nodes]]\n'
        'name = "pc"\ndevices = [{ kind = "mine", count = 2 }, { kind = "H100", count = 1 }]\n'
        'inside = { kind = "PCIe", gigabytes_per_second = 12 }\n'
    )
    result = command_line.run("estimate", *GPT, "--cluster", cluster, "--efficiency", "0.4", "--out", out)
    assert result.exit_code == 0, result.output
    written = load_profile(out)
    assert set(written.devices) == {"mine", "H100"}
    assert written.costs("mine", 1, 1).forward_seconds == pytest.approx(known)


PROFILE_REFUSES = [
    ("", "Missing option '--model'"),
    ("--model resnet", "'resnet' is not a model name; write for example timm:.* or hf:gpt2"),
    ("--model timm:vit_tiny", "timm has no model 'vit_tiny'; it has for example .*vit"),
    ("--model timm:vit_tiny_patch16_224 --set depht=2", "cannot be built with depht=2: .*depht"),
    ("--model timm:vit_tiny_patch16_224 --set depth", "'depth' is not KEY=VALUE, such as depth=6"),
    ("--model timm:ghostnet_100", "GhostNet has more than one row of blocks"),
    ("--model hf:gpt2 --tp 5", "tensor parallel 5 does not divide the 12 attention heads of GPT2LMHead"),
    ("--model timm:vit_tiny_patch16_224 --tp 2", "does not divide the 3 attention heads"),
    ("--model hf:gpt2 --tp 1,4 --nproc 2", "tensor parallel 4 needs 4 devices"),
    ("--model hf:gpt2 --tp 2 --nproc 3", "3 ranks cannot be divided"),
    ("--model hf:gpt3", "transformers has no model type 'gpt3'"),
    ("--model hf:bert-base-uncased", "try hf:bert$"),
    ("--model hf:gpt2 --set n_layers=2", "hf:gpt2 has no option 'n_layers'; did you mean n_layer"),
    ("--model hf:gpt2 --sequence 4096", "hf:gpt2 takes at most 1024 tokens, not 4096"),
    ("--model hf:gpt2 --image-size 32", "hf:gpt2 does not take images; leave the image size out"),
    ("--model hf:gpt2 --out /no/such/folder/p.json", "there is no folder /no/such/folder"),
]
SIZES = " ".join(GPT)
ESTIMATE_REFUSES = [
    ("--hidden 4", "Missing option '--layers'"),
    (SIZES, "no device to estimate for; name at least one kind"),
    (f"{SIZES} --device A100", "--device A100 is not known; valid: A100-40, .*, or A100=TFLOPS; did you mean A"),
    (f"{SIZES} --device T4 --efficiency 2", "efficiency=2.0"),
    (f"{SIZES} --device T4 --efficiency A10=0.4", "there is an efficiency of A10, but no such device; .* T4"),
    (f"{SIZES} --device T4 --efficiency T4=half", "--efficiency T4=half: 'half' is no number above 0"),
    (f"{SIZES} --device new=fast", "--device new=fast: 'fast' is no number above 0; give TFLOP/s and gigabytes"),
    (f"{SIZES} --device new=100,-1", "'-1' is no number above 0"),
    (f"{SIZES} --device T4 --micro-batch 1,x", "'1,x' is not a list of whole numbers; write it like 1,2,4"),
    (f"{SIZES} --device T4 --micro-batch 0", "'0': 0 is below 1"),
]


@pytest.mark.parametrize(
    ("command", "line", "words"),
    [("profile", *each) for each in PROFILE_REFUSES] + [("estimate", *each) for each in ESTIMATE_REFUSES],
)
def test_wrong_options_are_reported_in_one_line(command: str, line: str, words: str, tmp_path: Path) -> None:
    result = command_line.run(command, "--out", tmp_path / "p.json", *line.split())
    assert result.exit_code == 2
    assert re.search(words, " ".join(result.output.split())), result.output
    assert "Traceback" not in result.output and not (tmp_path / "p.json").exists()
