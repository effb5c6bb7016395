"""The command `colossal-hetero checkpoint`: what it lists, which damage it finds, what it exports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import command_line
from tests.support.layer_checkpoints import save_steps, tensors

BLOCK = "block-0001.tp0of1.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_steps(tmp_path / "checkpoints", 10, 20)
    return tmp_path / "checkpoints"


def test_the_list_tells_complete_checkpoints_from_others(folder: Path) -> None:
    (folder / "step-00000020/manifest.json").unlink()
    (folder / ".unfinished-step-00000030.run.2.0").mkdir()
    result = command_line.run("checkpoint", "ls", folder)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.replace("│", " ").splitlines()]
    assert [(row[0], row[-1]) for row in rows if row and row[0].startswith(("step", ".un")) and ":" not in row[0]] == [
        ("step-00000010", "complete"),
        ("step-00000020", "torn"),
        (".unfinished-step-00000030.run.2.0", "torn"),
    ]
    assert "step-00000020: " in result.output and "is not complete: it has no manifest.json" in result.output
    assert ".unfinished-step-00000030.run.2.0: left by a save that was interrupted" in result.output
    (folder / "step-00000010" / BLOCK).unlink()
    result = command_line.run("checkpoint", "ls", folder)
    assert f"step-00000010: {folder}/step-00000010/{BLOCK} is missing" in result.output


def test_verify_reads_every_byte_and_names_damaged_files(folder: Path) -> None:
    result = command_line.run("checkpoint", "verify", folder)
    assert result.exit_code == 0 and result.output == "step-00000020: whole\nstep-00000010: whole\n"
    for name in (BLOCK, "states.bin", "part-a.json", "manifest.json"):
        path = folder / "step-00000010" / name
        original = path.read_bytes()
        for changed in range(0, len(original), max(1, len(original) // 7)):
            content = bytearray(original)
            content[changed] ^= 1
            path.write_bytes(content)
            result = command_line.run("checkpoint", "verify", folder, "--step", 10)
            if name in ("part-a.json", "manifest.json"):
                result = command_line.run("checkpoint", "verify", folder)
            assert result.exit_code == 1 and name in result.output, (name, changed, result.output)
        path.write_bytes(original)
    assert command_line.run("checkpoint", "verify", folder, "--step", 20).exit_code == 0


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_export_writes_the_parameters_of_the_whole_model(folder: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"model{ending}"
    result = command_line.run("checkpoint", "export", folder, "--step", 10, "--out", out)
    assert result.exit_code == 0 and result.output.endswith(f"{out}: 8 tensors of step 10\n"), result.output
    if ending == ".pt":
        found = torch.load(out, weights_only=True)
    else:
        found = pytest.importorskip("safetensors.torch").load_file(out)
    expected = {key.removeprefix("param."): value for key, value in tensors(10).items() if key.startswith("param.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_export_in_shards_has_the_layout_of_hugging_face(folder: Path, tmp_path: Path) -> None:
    load = pytest.importorskip("safetensors.torch").load_file
    expected = {key.removeprefix("param."): value for key, value in tensors(10).items() if key.startswith("param.")}
    whole = sum(value.nbytes for value in expected.values())
    for size in (1, 600, 1200, whole - 1):
        out = tmp_path / f"{size}/model.safetensors"
        out.parent.mkdir()
        command = ("checkpoint", "export", folder, "--step", 10, "--out", out, "--shard-size", size / 1e9)
        result = command_line.run(*command)
        index = json.loads(out.with_name("model.safetensors.index.json").read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
        assert result.output.endswith(f"{out}.index.json: 8 tensors of step 10 in {len(files)} shards\n"), result.output
        assert files == [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
        assert sorted(path.name for path in out.parent.iterdir()) == [*files, "model.safetensors.index.json"]
        assert index["metadata"]["total_size"] == whole and index["weight_map"].keys() == expected.keys()
        for file in files:
            found = load(out.with_name(file))
            assert {name for name, where in index["weight_map"].items() if where == file} == found.keys()
            assert len(found) == 1 or sum(value.nbytes for value in found.values()) <= size
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
    # What fits is one file; where one is, shards would not be loaded.
    assert command_line.run(*command[:-1], whole / 1e9).output.endswith(f"{out}: 8 tensors of step 10\n")
    assert "would be loaded in place of the shards" in command_line.failure(*command)
    assert "cannot have several shards" in command_line.failure(*command[:-3], out.with_name("x.pt"), *command[-2:])


def test_what_is_wrong_is_said_in_one_line(folder: Path, tmp_path: Path) -> None:
    assert "there is no folder" in command_line.failure("checkpoint", "ls", tmp_path / "nothing")
    assert "has no checkpoint of step 11" in command_line.failure("checkpoint", "verify", folder, "--step", 11)
    assert "no checkpoint of step 11; there are: 20, 10" in command_line.failure(
        "checkpoint", "export", folder, "--step", 11, "--out", tmp_path / "x.pt"
    )
    assert "end its name in" in command_line.failure("checkpoint", "export", folder, "--out", tmp_path / "x.bin")
    (folder / "step-00000020" / BLOCK).unlink()
    assert "the checkpoint of step 10 is complete" in command_line.failure(
        "checkpoint", "export", folder, "--step", 20, "--out", tmp_path / "x.pt"
    )
