"""The doctor watches a script under torchrun: it names the slow rank and why, and changes nothing in the script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colossal_hetero.testing import cpu_quota
from tests.support.forked_python import ForkedPopen
from tests.support.paths import REPOSITORY
from tests.support.random_examples import IS_THOROUGH

SCRIPT = REPOSITORY / "benchmarks" / "doctor_script.py"
PLAIN = [str(SCRIPT)]


def torchrun(folder: Path, *command: str) -> tuple[int, str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    popen: Any = subprocess.Popen if IS_THOROUGH else ForkedPopen
    with pytest.MonkeyPatch.context() as context, (folder / "errors").open("w") as errors:
        context.chdir(folder)
        output = [*launcher, *command, "--out", str(folder)]
        status = popen(output, env=environment, stdout=subprocess.DEVNULL, stderr=errors).wait(240)
    return status, (folder / "errors").read_text()


def watched(folder: Path, *arguments: str) -> tuple[list[dict[str, Any]], int, str]:
    found = folder / "found.json"
    command = ["-m", "colossal_hetero.doctor", "--after", "1000", "--json", str(found), *PLAIN]
    status, errors = torchrun(folder, *command, *arguments)
    return json.loads(found.read_text())["findings"] if found.exists() else [], status, errors


def can_limit() -> bool:
    try:
        with cpu_quota(1.0):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("way", "fault", "cause", "slow"),
    [
        ("ddp", "loader", "loader", 1),  # sleeps, so that it does not depend on what else the machine does
        ("ddp", "none", None, 1),
        ("fsdp", "loader", "loader", 1),
        ("ddp", "quota", "compute", 1),
        ("colossalai", "compute", "compute", 0),
    ][: None if IS_THOROUGH else 1],
)
def test_the_slow_rank_is_named_and_the_script_runs_as_without_the_doctor(
    way: str, fault: str, cause: str | None, slow: int, tmp_path: Path
) -> None:
    if fault == "quota" and not can_limit():
        pytest.skip("CPU control groups are not writable")
    size = ("--iterations", "160") if IS_THOROUGH else ("--iterations", "110", "--width", "64")
    options = ("--way", way, "--fault", fault, "--slow", str(slow), *size)
    findings, status, errors = watched(tmp_path, *options)
    assert status == 0, errors
    if cause is None:
        # Other programs may really slow a rank down.
        assert all(each["cause"] == "compute" and "of a core" in each["why"] for each in findings), errors
    else:
        assert (findings[0]["cause"], findings[0]["ranks"]) == (cause, [slow]), errors
        assert f"Rank {slow} is slow: {cause}." in errors

    plain = tmp_path / "plain"
    plain.mkdir()
    assert torchrun(plain, *PLAIN, "--way", way, *size)[0] == 0
    for rank in ("0.json", "1.json"):
        before, after = (json.loads((folder / rank).read_text()) for folder in (plain, tmp_path))
        assert before["losses"] == after["losses"]  # to the last bit
        assert before["draw"] == after["draw"]
        assert before["path"] == after["path"] == str(SCRIPT.parent)
        assert after["argv"] == [str(SCRIPT), *options, "--out", str(tmp_path)]


def test_a_script_that_fails_keeps_its_traceback_and_status(tmp_path: Path) -> None:
    _, status, errors = watched(tmp_path, "--fault", "error", "--iterations", "20")
    assert status == 1 and "ValueError: the script fails on purpose" in errors
    assert f'File "{SCRIPT}"' in errors


@pytest.mark.parametrize(
    ("ending", "status"), [("sys.exit(3)", 3), ("raise KeyboardInterrupt", 130), ("pass", 0)][: 3 if IS_THOROUGH else 1]
)
def test_exits_are_those_of_the_script(ending: str, status: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    body = (
        "import sys\nassert sys.modules['__main__'].__file__ == sys.argv[0]\nassert 'colossalai' not in sys.modules\n"
    )
    script.write_text(f"from colossal_hetero.doctor import watch\nwatch()\n{body}{ending}\n")
    command = [sys.executable, "-m", "colossal_hetero.doctor", str(script), "--json", "of the script"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=False, capture_output=True)
    assert done.returncode in (status, -2 if status == 130 else status), done.stderr
