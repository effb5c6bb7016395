"""What each command refuses, in one line that says why: the commands and their words are in ``refusals.txt``."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from colossal_hetero.planner.batches.batch_profile import save_profile as save_batch_profile
from colossal_hetero.planner.cost.plan import save_plan
from colossal_hetero.planner.profile.layer_profile import save_profile
from tests.support.batch_profiles import profile as batch_profile
from tests.support.command_line import run
from tests.support.layer_checkpoints import save_steps
from tests.support.plans import plan
from tests.support.transcripts import missing_part, read_cases
from tests.unit.commands.test_plan_command import CLUSTER, PRICES, profile

SIZES = "--layers 4 --hidden 64 --heads 4 --vocabulary 100 --sequence 32"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("files")
    files = {"layers": "layers.json", "plan": "plan.json", "batches": "batches.json", "cluster": "cluster.toml"}
    found = {name: folder / file for name, file in files.items()}
    found |= {"prices": folder / "prices.toml", "checkpoints": folder / "checkpoints", "folder": folder}
    found["cluster"].write_text(CLUSTER)
    found["prices"].write_text(CLUSTER.replace("\n[[clusters]]", PRICES, 1))
    save_profile(profile(), found["layers"])
    save_plan(plan(), found["plan"])
    save_batch_profile(batch_profile(links=[]), found["batches"])
    save_steps(found["checkpoints"], 10, 20)
    return {**found, "sizes": SIZES}


@pytest.mark.parametrize(("command", "says"), read_cases(Path(__file__).with_name("refusals.txt")))
def test_what_is_wrong_is_said_in_one_line(names: dict[str, object], command: str, says: str) -> None:
    result = run(*shlex.split(command.format(**names)))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    message = result.output.partition("Error: ")[2]
    (_, *pointer) = message.splitlines()
    assert all(line.startswith("  ") for line in pointer), "below the line there is only the place in a layout"
    missing = missing_part(says, message)
    assert missing is None, missing
