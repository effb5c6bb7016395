"""``batches``, ``checkpoint``, ``evaluate``, ``estimate``: what they print and write; what commands import."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colossal_hetero.cli.main import batches
from colossal_hetero.cli.plan import plan
from colossal_hetero.planner.batches.allocation import ACCUMULATIONS, METHODS
from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.plan import load_plan
from colossal_hetero.planner.profile.layer_profile import load_profile
from colossal_hetero.planner.stages.split_methods import METHODS as SPLIT_METHODS
from tests.support.batch_profiles import profile
from tests.support.command_line import failure, run
from tests.support.layer_checkpoints import save_steps, tensors
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans

EXAMPLE = REPOSITORY / "examples/zero/profiles/a100-80-a100-40.json"
CLUSTER = REPOSITORY / "examples/plans/clusters/a100-v100.toml"
LAYERS = REPOSITORY / "examples/plans/opt-350-a100-v100.json"


def saved(path: Path, **changes: Any) -> Path:
    save_profile(profile(**changes), path)
    return path


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
        "import colossal_hetero.balance.group_speed, colossal_hetero.balance.report\n"
        "from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs, RankTimes, decide\n"
        "for mode in ('off', 'resize', 'migrate', 'semi', 'auto'):\n"
        "    decide([RankTimes(1, 1), RankTimes(4, 4)], Costs(), BalanceConfig(mode=mode), BalancePlan.idle(2))\n"
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
    result = run("checkpoint", "ls", folder)
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
    result = run("checkpoint", "ls", folder)
    assert f"step-00000010: {folder}/step-00000010/{BLOCK} is missing" in result.output


def test_verify_reads_every_byte_and_names_damaged_files(folder: Path) -> None:
    result = run("checkpoint", "verify", folder)
    assert result.exit_code == 0 and result.output == "step-00000020: whole\nstep-00000010: whole\n"
    for name in (BLOCK, "states.bin", "part-a.json", "manifest.json"):
        path = folder / "step-00000010" / name
        original = path.read_bytes()
        for changed in range(0, len(original), max(1, len(original) // 7)):
            content = bytearray(original)
            content[changed] ^= 1
            path.write_bytes(content)
            result = run("checkpoint", "verify", folder, "--step", 10)
            if name in ("part-a.json", "manifest.json"):
                result = run("checkpoint", "verify", folder)
            assert result.exit_code == 1 and name in result.output, (name, changed, result.output)
        path.write_bytes(original)
    assert run("checkpoint", "verify", folder, "--step", 20).exit_code == 0


def test_export_writes_the_parameters_of_the_whole_model(folder: Path, tmp_path: Path) -> None:
    expected = {key.removeprefix("param."): value for key, value in tensors(10).items() if key.startswith("param.")}
    for ending, load in ((".safetensors", load_file), (".pt", partial(torch.load, weights_only=True))):
        out = tmp_path / f"model{ending}"
        result = run("checkpoint", "export", folder, "--step", 10, "--out", out)
        assert result.exit_code == 0 and result.output.endswith(f"{out}: 8 tensors of step 10\n"), result.output
        found = load(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    (folder / "step-00000020" / BLOCK).unlink()
    assert "the checkpoint of step 10 is complete" in failure(
        "checkpoint", "export", folder, "--step", 20, "--out", tmp_path / "x.pt"
    )


def test_export_in_shards_has_the_layout_of_hugging_face(folder: Path, tmp_path: Path) -> None:
    expected = {key.removeprefix("param."): value for key, value in tensors(10).items() if key.startswith("param.")}
    whole = sum(value.nbytes for value in expected.values())
    for size in (1, 600, 1200, whole - 1):
        out = tmp_path / f"{size}/model.safetensors"
        out.parent.mkdir()
        command = ("checkpoint", "export", folder, "--step", 10, "--out", out, "--shard-size", size / 1e9)
        result = run(*command)
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
    assert run(*command[:-1], whole / 1e9).output.endswith(f"{out}: 8 tensors of step 10\n")
    assert "would be loaded in place of the shards" in failure(*command)
    assert "cannot have several shards" in failure(*command[:-3], out.with_name("x.pt"), *command[-2:])


BEST = "tp 1, dp 4 x pp [V100-16 0-4 | V100-16 5-8 | A100-40 9-23], micro-batch 1 x 32"


def test_a_layout_is_priced_as_the_plan(tmp_path: Path) -> None:
    plan = make_plans(load_cluster(CLUSTER), load_profile(LAYERS), global_batch=128, keep=1)[0].plan
    out, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    result = run("evaluate", BEST, CLUSTER, LAYERS, "--out", out, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert f"predicted: an iteration of {plan.iteration_seconds:.3f} s" in result.output
    assert "by event simulation: 4.784 s; the prediction above is +0.0% of it" in result.output
    assert "memory: every stage fits; the fullest, on V100-16, needs 10.6 of 14.9 GiB (71%)" in result.output
    assert "price: unknown" in result.output and picture.stat().st_size > 1000
    written = load_plan(out)
    assert (written.cluster, written.profile, written.method) == (CLUSTER.name, LAYERS.name, "given")
    assert written.iteration_seconds == pytest.approx(plan.iteration_seconds, rel=1e-9)
    assert run("evaluate", out, CLUSTER, LAYERS).output == result.output
    # On other machines, the devices are chosen again, and flags give batches.
    changed = tmp_path / "cluster.toml"
    first, *nodes = CLUSTER.read_text().split("[[clusters.nodes]]")
    changed.write_text("[[clusters.nodes]]".join([first, *reversed([each.rstrip() + "\n\n" for each in nodes])]))
    assert "the devices were chosen again" in run("evaluate", out, changed, LAYERS).output
    changed.write_text(CLUSTER.read_text().replace("devices = [", "dollars_per_hour = 2.5\ndevices = ["))
    shown = run("evaluate", "dp 4 x pp [A100-40 0-23], micro-batch 2", changed, LAYERS, "--global-batch", 64).output
    assert "as 4 replicas × 8 micro-batches of 2" in shown and "price: 2.50 $ an hour" in shown


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'colossal-hetero[plot]'" in failure("evaluate", BEST, CLUSTER, LAYERS, "--plot", "plan.png")


FILES = (CLUSTER, LAYERS)
LAYOUT = "dp 4 x pp [A100-40 0-23], micro-batch 1 x 32"


def test_files_with_odd_names(tmp_path: Path) -> None:
    path = tmp_path / "run[1].json"
    assert run("evaluate", LAYOUT, *FILES, "--out", path).exit_code == 0
    assert run("evaluate", path, *FILES).exit_code == 0
    paths = [tmp_path / name / "plan.json" for name in ("a", "b")]
    for path, count in zip(paths, (32, 16), strict=True):
        path.parent.mkdir()
        assert run("evaluate", LAYOUT.replace("32", str(count)), *FILES, "--out", path).exit_code == 0
    other = paths[0].rename(tmp_path / "other.json")
    assert "other: 99.4 % slower than plan" in run("evaluate", other, paths[1], *FILES).output
    other.rename(paths[0])
    assert "1: 99.4 % slower than 2" in run("evaluate", *paths, *FILES).output
    output = run("evaluate", LAYOUT, LAYOUT, *FILES).output
    assert "2: as fast as 1\n  the same layout on other devices, or the same plan" in output


GPT = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocabulary", "100", "--sequence", "32"]


def test_an_estimate_of_any_device(tmp_path: Path) -> None:
    """Devices with their own speed, those of a cluster file, and a share of the speed for each kind."""
    out, cluster = tmp_path / "estimate.json", tmp_path / "cluster.toml"
    devices = ["--device", "W7900=122,48", "--device", "odd=61", "--device", "RTX-4090"]
    sizes = ["--tp", "1,2", "--micro-batch", "1,8"]
    result = run("estimate", *GPT, *devices, *sizes, "--efficiency", "odd=0.8", "--out", out)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "[kinds.W7900] memory_gb = 48, tflops = 122" in shown and "[kinds.odd] memory_gb = …, tflops = 61" in shown
    assert "0.4 (W7900), 0.8 (odd), 0.4 (RTX-4090) of nominal" in shown
    written = load_profile(out)
    assert written.blocks == 4 and result.output.count(" odd ") >= 4
    assert written.tensor_parallel_degrees("odd") == (1, 2) and written.micro_batches("odd", 2) == (1, 8)
    known, odd = (written.costs(name, 1, 1).forward_seconds for name in ("W7900", "odd"))
    assert odd == pytest.approx(known)  # half as fast, and twice the share
    cluster.write_text(
        'schema = 1\n[kinds.mine]\nmemory_gb = 24\ntflops = 122\n[[clusters]]\nname = "x"\n[[clusters.nodes]]\n'
        'name = "pc"\ndevices = [{ kind = "mine", count = 2 }, { kind = "H100", count = 1 }]\n'
        'inside = { kind = "PCIe", gigabytes_per_second = 12 }\n'
    )
    result = run("estimate", *GPT, "--cluster", cluster, "--efficiency", "0.4", "--out", out)
    assert result.exit_code == 0, result.output
    written = load_profile(out)
    assert set(written.devices) == {"mine", "H100"}
    assert written.costs("mine", 1, 1).forward_seconds == pytest.approx(known)
