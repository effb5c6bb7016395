"""What is refused, and in which words. Each text file is one table of cases: a line ``$ case``, below it what is said.

``commands.txt`` has command lines, ``flags.txt`` flags of the examples, ``settings.txt`` Python expressions, and
``files.txt`` changes of valid files.
"""

import importlib
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import colossal_hetero
from colossal_hetero import ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.elastic.environment import ElasticEnvironment
from colossal_hetero.planner import Curve
from colossal_hetero.planner.batches import batch_profile as batch_profiles
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.evaluate import evaluate_layout
from colossal_hetero.planner.cost.plan import load_plan, save_plan
from colossal_hetero.planner.profile import layer_profile as layer_profiles
from colossal_hetero.planner.profile.estimate import Transformer
from colossal_hetero.testing import Stragglers, inject_stragglers
from examples.common.options import UsageError
from tests.support import machines, plans
from tests.support.batch_profiles import profile as batch_profile
from tests.support.command_line import run
from tests.support.layer_checkpoints import save_steps
from tests.support.paths import REPOSITORY
from tests.support.transcripts import missing_part, read_cases
from tests.unit.commands.test_plan_command import CLUSTER, PRICES
from tests.unit.commands.test_plan_command import profile as planned_profile
from tests.unit.elastic.test_membership import JOB
from tests.unit.planner.cluster.test_cluster_file import FILE
from tests.unit.planner.profile.test_layer_profile import profile as layer_profile


def cases(name: str) -> list[tuple[str, str]]:
    return read_cases(Path(__file__).with_name(f"{name}.txt"))


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Valid files, by their names in ``commands.txt``."""
    folder = tmp_path_factory.mktemp("files")
    files = {"layers": "layers.json", "plan": "plan.json", "batches": "batches.json", "cluster": "cluster.toml"}
    found = {name: folder / file for name, file in files.items()}
    found |= {"prices": folder / "prices.toml", "checkpoints": folder / "checkpoints", "folder": folder}
    found["cluster"].write_text(CLUSTER)
    found["prices"].write_text(CLUSTER.replace("\n[[clusters]]", PRICES, 1))
    layer_profiles.save_profile(planned_profile(), found["layers"])
    save_plan(plans.plan(), found["plan"])
    batch_profiles.save_profile(batch_profile(links=[]), found["batches"])
    save_steps(found["checkpoints"], 10, 20)
    return {**found, "sizes": "--layers 4 --hidden 64 --heads 4 --vocabulary 100 --sequence 32"}


@pytest.mark.parametrize(("command", "says"), cases("commands"))
def test_commands(names: dict[str, object], command: str, says: str) -> None:
    result = run(*shlex.split(command.format(**names)))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    message = result.output.partition("Error: ")[2]
    (_, *pointer) = message.splitlines()
    assert all(line.startswith("  ") for line in pointer), "below the line there is only the place in a layout"
    missing = missing_part(says, message)
    assert missing is None, missing


@pytest.mark.parametrize(("line", "says"), cases("flags"))
def test_flags_of_examples(line: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    example, ranks, *flags = line.split()
    module = importlib.import_module(f"examples.{example}.options")
    with pytest.raises(UsageError) as error:
        if example == "elastic":
            module.check_options(module.parse_demo_options(flags))
        else:
            module.check_options(module.parse_options(flags), int(ranks))
    message = str(error.value)
    assert "\n" not in message and missing_part(says, message) is None, message


EXAMPLES = REPOSITORY / "examples/plans"
PLANNING = PlanConfig(
    cluster=machines.machines(machines.Nodes("InfiniBand", (1, 1))), profile="profile.json", global_batch_size=8
)


def elastic_plugin(**changes: Any) -> object:
    return HeteroHybridParallelPlugin(**dict(plan="auto", planning=PLANNING, elastic=ElasticConfig()) | changes)


def elastic_environment(**changes: str | None) -> object:
    return ElasticEnvironment.from_environ({k: v for k, v in {**JOB, **changes}.items() if v is not None})


def stragglers(**changes: Any) -> None:
    made = Stragglers(**{"slowdowns": {0: 3.0}, "world_size": 2, **changes})
    inject_stragglers(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), made)


MODULES = (
    *("balance", "testing", "elastic.environment", "elastic.membership", "elastic.world", "plugin.zero.zero_plugin"),
    *("planner", "planner.batches.allocation", "planner.cluster.all_reduce", "planner.cluster.gpu_catalog"),
    *("planner.cluster.topology", "planner.cost.simulate", "planner.profile.estimate", "planner.cost.layout_line"),
)
SETTINGS: dict[str, Any] = {}
for each in MODULES:
    SETTINGS |= vars(importlib.import_module(f"colossal_hetero.{each}"))
SETTINGS |= {name: getattr(colossal_hetero, name) for name in colossal_hetero.__all__} | vars(plans) | vars(machines)
SETTINGS |= dict(elastic_plugin=elastic_plugin, elastic_environment=elastic_environment, stragglers=stragglers)
SETTINGS |= dict(batch_profile=batch_profile, layer_profile=layer_profile, inf=math.inf, nan=math.nan, np=np)
SETTINGS |= dict(evaluate_layout=evaluate_layout, OPT_CLUSTER=load_cluster(EXAMPLES / "clusters/a100-v100.toml"))
SETTINGS["OPT_350"] = layer_profiles.load_profile(EXAMPLES / "opt-350-a100-v100.json")
SETTINGS["CURVE"] = Curve.from_seconds([1.0, 2.0])
SETTINGS["MODEL"] = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)


@pytest.mark.parametrize(("expression", "says"), cases("settings"))
def test_settings(expression: str, says: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        eval(expression, dict(SETTINGS))
    missing = missing_part(says, str(error.value))
    assert missing is None, missing


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "batch_profile": (lambda path: batch_profiles.save_profile(batch_profile(), path), batch_profiles.load_profile),
    "layer_profile": (lambda path: layer_profiles.save_profile(layer_profile(), path), layer_profiles.load_profile),
    "plan": (lambda path: save_plan(plans.plan(), path), load_plan),
    "plan-interleaved": (lambda path: save_plan(plans.chunked("interleaved"), path), load_plan),
    "plan-zbv": (lambda path: save_plan(plans.chunked("zbv"), path), load_plan),
    "cluster": (lambda path: path.write_text(FILE), load_cluster),
}


@pytest.mark.parametrize(("case", "says"), cases("files"))
def test_files(case: str, says: str, tmp_path: Path) -> None:
    kind, _, change = case.partition(": ")
    save, load = FILES[kind]
    path = tmp_path / "file"
    save(path)
    scope = {"content": path.read_text() if kind == "cluster" else json.loads(path.read_text())}
    before = json.dumps(scope)
    exec(change, {}, scope)
    assert json.dumps(scope) != before, "the change changes nothing"
    path.write_text(scope["content"] if kind == "cluster" else json.dumps(scope["content"]))
    with pytest.raises(ValueError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message and "pydantic" not in message
    missing = missing_part(says, message)
    assert missing is None, missing
