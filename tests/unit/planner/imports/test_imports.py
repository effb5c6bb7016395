"""Profiles from Sailor's files: small files made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from colossal_hetero.planner.imports.sailor_repository import read_sailor_repository
from colossal_hetero.planner.profile.layer_profile import load_model_profile
from tests.support.command_line import failure, run


def write_sailor(folder: Path) -> Path:
    """Two degrees of a model of five layers on one GPU, in Sailor's folders."""
    layers = range(5)
    parameters = (100, 10, 10, 10, 60)
    times: dict[str, Any] = {
        size: {
            degree: {str(layer): [0.01 * (layer + 1) * int(size), 0.02 * int(size), 0.005] for layer in layers}
            for degree in ("1", "2")
        }
        for size in ("1", "2")
    }
    sizes = {
        degree: {
            str(layer): {
                "params_floats": 0,
                "params_bytes": parameters[layer] * 4 // int(degree),
                "act_output_bytes": 8,
                "act_mem_bytes": 16,
            }
            for layer in layers
        }
        for degree in ("1", "2")
    }
    planner = folder / "sailor" / "Planner"
    path = planner / "sailor_planner" / "profiles" / "tiny" / "V100-16" / "profile.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(times))
    (planner / "llm_info.json").write_text(json.dumps({"tiny": sizes}))
    return path


def test_sailors_repository(tmp_path: Path) -> None:
    write_sailor(tmp_path)
    profile = read_sailor_repository(tmp_path, "tiny").profile
    assert (profile.name, profile.layers, profile.devices) == ("tiny", 5, ("V100-16",))
    assert profile.tensor_parallel_degrees("V100-16") == (1, 2)
    times = profile.times_of("V100-16", 2, 2)
    assert times.forward_seconds == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.10])
    assert times.backward_seconds == pytest.approx([0.04] * 5)
    assert profile.sizes[1].parameter_bytes == (200, 20, 20, 20, 120)
    # The step was timed for the embedding, two blocks and the head.
    assert profile.times_of("V100-16", 1, 1).update_seconds == pytest.approx(
        [0.005 * each / 180 for each in (100, 10, 10, 10, 60)], abs=1e-9
    )


def test_what_is_wrong_in_sailors_files_is_said(tmp_path: Path) -> None:
    path = write_sailor(tmp_path)
    with pytest.raises(ValueError, match=r"no profiles/small/GPU/profile.json.*it has those of tiny"):
        read_sailor_repository(tmp_path, "small")
    content = json.loads(path.read_text())
    content["1"]["1"]["0"] = [0.1, 0.2]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="needed are seconds of forward, backward, update"):
        read_sailor_repository(tmp_path, "tiny")
    path.write_text(json.dumps({"mbs": content}))
    with pytest.raises(ValueError, match="entries by number"):
        read_sailor_repository(tmp_path, "tiny")
    (tmp_path / "sailor/Planner/llm_info.json").unlink()
    with pytest.raises(ValueError, match=r"no llm_info\.json, which has the sizes"):
        read_sailor_repository(tmp_path, "tiny")


def test_the_command_reads_both_of_sailors_forms(tmp_path: Path, tables: Path) -> None:
    write_sailor(tmp_path)
    out = tmp_path / "profile.json"
    for folder in (tmp_path, tables):
        result = run("import", "sailor", folder, "--model", "tiny", "--out", out)
        assert result.exit_code == 0, result.output
        assert load_model_profile(out).name == "tiny"
    assert "has no model 'none'" in failure("import", "sailor", tables, "--model", "none", "--out", out)
