"""``colossal-hetero batches`` and ``checkpoint``: what they print and write, and errors; what all commands import."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file

from colossal_hetero.cli.main import batches
from colossal_hetero.cli.plan import plan
from colossal_hetero.planner.batches.allocation import ACCUMULATIONS, METHODS
from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.stages.split_methods import METHODS as SPLIT_METHODS
from tests.support import command_line
from tests.support.batch_profiles import device, profile
from tests.support.layer_checkpoints import save_steps, tensors
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples/zero/profiles/a100-80-a100-40.json"
CLUSTER = REPOSITORY / "examples/plans/clusters/a100-v100.toml"
LAYERS = REPOSITORY / "examples/plans/opt-350-a100-v100.json"
FULL_LINKS = [
    {"ranks": (a, b), "protocol": "gloo", "latency_seconds": 1e-4, "bytes_per_second": 1e9}
    for a in range(4)
    for b in range(a)
]


def run(*arguments: object) -> Result:
    return command_line.run("batches", *arguments)


def failure(*arguments: object) -> str:
    return command_line.failure("batches", *arguments)


def saved(path: Path, **changes: Any) -> Path:
    save_profile(profile(**changes), path)
    return path


def test_the_table_shows_the_share_of_each_device_and_the_other_methods() -> None:
    result = run(EXAMPLE, "--global-batch", 1024)
    assert result.exit_code == 0, result.output
    for words in ("0-3", "A100-SXM4-80GB", "busy", "[s]", "[GiB]", "/80.0", "/40.0", "uniform"):
        assert words in result.output
    rows = [line.split()[0] for line in result.output.splitlines() if line.strip()]
    assert [name for name in rows if name in METHODS] == ["exact", "exact", "uniform", "flops", "poplar"]
    assert max(map(len, result.output.splitlines())) <= 140


def test_json_holds_every_rank_and_the_comparison(tmp_path: Path) -> None:
    path = saved(tmp_path / "profile.json", links=[])
    out = tmp_path / "batches.json"
    assert run(path, "--global-batch", 37, "--stage", 1, "--accumulation", "per_rank", "--out", out).exit_code == 0
    content = json.loads(out.read_text())
    assert content["schema"] == 1 and content["measured_stage"] == 0
    assert content["allocation"]["stage"] == 1 and content["allocation"]["accumulation"] == "per_rank"
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1, 2, 3]
    assert sum(rank["samples"] for rank in content["ranks"]) == 37
    for rank in content["ranks"]:
        assert sum(size * count for size, count in rank["runs"]) == rank["samples"]
        total = rank["busy_seconds"] + rank["idle_seconds"] + content["allocation"]["communication_seconds"]
        assert total == pytest.approx(content["allocation"]["wall_seconds"])
    best, *others = (line["wall_seconds"] for line in content["comparison"] if line["accumulation"] == "per_rank")
    assert all(best <= other for other in others)
    assert sorted(tmp_path.iterdir()) == [out, path]


def test_what_a_profile_lacks_is_named(tmp_path: Path) -> None:
    slow, tiny = device("slow", flops=None), device("tiny", memory_bytes=2**30, max_batch=0, points=[])
    for method, changes, words in (
        ("flops", dict(kinds=[device(), slow], links=[]), "none for slow"),
        ("adapt", dict(links=FULL_LINKS[:-1]), "no gloo link between ranks 2 and 3"),
        ("exact", dict(kinds=[device(), tiny], ranks=[0, 0, 0, 1], links=FULL_LINKS), "rank 3 (tiny) cannot hold one"),
    ):
        path = saved(tmp_path / "profile.json", **changes)
        assert words in failure(path, "--global-batch", 8, "--method", method)
        other = "adapt" if method == "exact" else "exact"  # only adapt drops a device without enough memory
        result = run(path, "--global-batch", 8, "--method", other)
        left_out = words.partition(" between")[0].partition("rank 3 (tiny) ")[2] or words.partition(" between")[0]
        assert result.exit_code == 0 and left_out in " ".join(result.output.split()), result.output


def test_the_package_is_the_command() -> None:
    command = [sys.executable, "-m", "colossal_hetero", "plan", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("Usage: python -m colossal_hetero plan [OPTIONS] CLUSTER PROFILE")

    # Commands list choices themselves, so that they start without importing the planner.
    choices = {option.name: option.type.choices for option in batches.params if hasattr(option.type, "choices")}
    assert {name: tuple(valid) for name, valid in choices.items()} == dict(accumulation=ACCUMULATIONS, method=METHODS)
    (splits,) = (option.type.choices for option in plan.params if option.name == "method")
    assert tuple(splits) == SPLIT_METHODS


def test_unneeded_packages_are_not_imported(tmp_path: Path) -> None:
    """One process runs all commands that need no torch."""
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "plan.json"
    save_steps(checkpoints, 10)
    few = ["--global-batch", 32, "--top", 1, "--micro-batch", 4]
    commands = [
        ["checkpoint", "ls", checkpoints],
        ["checkpoint", "verify", checkpoints],
        ["batches", EXAMPLE, "--global-batch", 64],
        ["plan", CLUSTER, LAYERS, *few, "--out", out],
        ["simulate", out],
        ["plan", CLUSTER, LAYERS, *few, "--schedule", "zbv"],
    ]
    code = (
        "import sys\n"
        "from colossal_hetero.cli.main import main\n"
        "import colossal_hetero.elastic.signals, colossal_hetero.elastic.environment\n"
        "early = {'numpy', 'scipy', 'pydantic', 'rich', 'torch', 'colossalai', 'matplotlib'} & set(sys.modules)\n"
        "assert not early, f'{early} are imported too early'\n"
        f"for command in {[[str(each) for each in command] for command in commands]}:\n"
        "    main(command, standalone_mode=False)\n"
        "    found = {'torch', 'colossalai', 'timm', 'matplotlib'} & set(sys.modules)\n"
        "    assert not found, f'{command} imports {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_export_writes_the_parameters_of_the_whole_model(folder: Path, tmp_path: Path) -> None:
    expected = {key.removeprefix("param."): value for key, value in tensors(10).items() if key.startswith("param.")}
    for ending, load in ((".safetensors", load_file), (".pt", partial(torch.load, weights_only=True))):
        out = tmp_path / f"model{ending}"
        result = command_line.run("checkpoint", "export", folder, "--step", 10, "--out", out)
        assert result.exit_code == 0 and result.output.endswith(f"{out}: 8 tensors of step 10\n"), result.output
        found = load(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    (folder / "step-00000020" / BLOCK).unlink()
    assert "the checkpoint of step 10 is complete" in command_line.failure(
        "checkpoint", "export", folder, "--step", 20, "--out", tmp_path / "x.pt"
    )


def test_export_in_shards_has_the_layout_of_hugging_face(folder: Path, tmp_path: Path) -> None:
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
            found = load_file(out.with_name(file))
            assert {name for name, where in index["weight_map"].items() if where == file} == found.keys()
            assert len(found) == 1 or sum(value.nbytes for value in found.values()) <= size
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
    # What fits is one file; where one is, shards would not be loaded.
    assert command_line.run(*command[:-1], whole / 1e9).output.endswith(f"{out}: 8 tensors of step 10\n")
    assert "would be loaded in place of the shards" in command_line.failure(*command)
    assert "cannot have several shards" in command_line.failure(*command[:-3], out.with_name("x.pt"), *command[-2:])
