"""What is refused, and in which words. Each text file is one table of cases: a line ``$ case``, below it what is said.

``commands.txt`` has command lines, ``flags.txt`` flags of the examples, ``files.txt`` changes of valid files, and
``settings.txt`` Python expressions, below the modules of the package, and those of tests, whose names they use.
"""

import copy
import importlib
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.utils.data import IterableDataset

import colossal_hetero
from colossal_hetero import ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.data_parallel.loader import make_loader
from colossal_hetero.data_parallel.sampler import GlobalBatchSampler
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
from tests.support import layer_checkpoints, machines, plans, small_problems, two_speeds
from tests.support.batch_profiles import device
from tests.support.batch_profiles import profile as batch_profile
from tests.support.command_line import run
from tests.support.layer_checkpoints import save_steps
from tests.support.paths import REPOSITORY
from tests.support.planning import make_plans, predict_plan
from tests.support.simulated_layers import Model, SimulatedClock
from tests.support.transcripts import missing_part, read_cases
from tests.unit.commands.test_plan_command import CLUSTER, PRICES
from tests.unit.commands.test_plan_command import profile as planned_profile
from tests.unit.elastic.test_membership import JOB
from tests.unit.planner.cluster.test_cluster_file import FILE
from tests.unit.planner.profile.test_layer_profile import profile as layer_profile
from tests.unit.profiling.test_layer_profiler import measure


def refusal(kinds: type[Exception] | tuple[type[Exception], ...], function: Callable, *arguments: Any) -> str:
    with pytest.raises(kinds) as error:
        function(*arguments)
    return str(error.value)


def command(line: str, folder: Path) -> str:
    """``{name}`` in a line is a valid file of this name."""
    files = {"layers": "layers.json", "plan": "plan.json", "batches": "batches.json", "cluster": "cluster.toml"}
    names: dict[str, Any] = {name: folder / file for name, file in files.items()}
    names |= {"prices": folder / "prices.toml", "checkpoints": folder / "checkpoints", "folder": folder}
    if not names["plan"].exists():
        names["cluster"].write_text(CLUSTER)
        names["prices"].write_text(CLUSTER.replace("\n[[clusters]]", PRICES, 1))
        layer_profiles.save_profile(planned_profile(), names["layers"])
        batch_profiles.save_profile(batch_profile(links=[]), names["batches"])
        save_steps(names["checkpoints"], 10, 20)
        save_plan(plans.plan(), names["plan"])
    names["sizes"] = "--layers 4 --hidden 64 --heads 4 --vocabulary 100 --sequence 32"
    result = run(*shlex.split(line.format(**names)))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    message = result.output.partition("Error: ")[2]
    (_, *pointer) = message.splitlines()
    assert all(line.startswith("  ") for line in pointer), "below the line there is only the place in a layout"
    return message


def flags(line: str, folder: Path) -> str:
    example, ranks, *given = line.split()
    module = importlib.import_module(f"examples.{example}.options")
    parse = module.parse_demo_options if example == "elastic" else module.parse_options
    check = module.check if example == "vit" else module.check_options
    message = refusal(UsageError, lambda: check(parse(given), *([] if example == "elastic" else [int(ranks)])))
    assert "\n" not in message
    return message


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


def sampler() -> GlobalBatchSampler:
    return GlobalBatchSampler(10, 4, 0, 1, shuffle=True, seed=7)


def planned(devices: dict[str, int], memory: int = 100, **changes: Any) -> None:
    """A search on one node, with some fields of the small profile, and with wishes."""
    fields = {name: changes.pop(name) for name in ("blocks", "degrees") if name in changes}
    fields |= {"micro_batches": changes.pop("sizes")} if "sizes" in changes else {}
    topology = small_problems.cluster(devices, memory=dict.fromkeys(devices, memory))
    make_plans(topology, small_problems.profile(**fields), **{"global_batch": 24} | changes)


def loader(dataset: Any, **options: Any) -> None:
    made = make_loader(dataset, 4, 0, 1, **options)
    made.divide_by(lambda samples: [[samples]])
    iter(made)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


HEAD = Path(__file__).with_name("settings.txt").read_text(encoding="utf-8").partition("$")[0]
MODULES, TESTS = (line.partition(": ")[2].split() for line in HEAD.splitlines())
SETTINGS: dict[str, Any] = {}
for each in MODULES:
    SETTINGS |= vars(importlib.import_module(f"colossal_hetero.{each}"))
SETTINGS |= {name: getattr(colossal_hetero, name) for name in colossal_hetero.__all__} | vars(plans) | vars(machines)
SETTINGS |= dict(elastic_plugin=elastic_plugin, elastic_environment=elastic_environment, stragglers=stragglers)
SETTINGS |= dict(sampler=sampler, loader=loader, make_loader=make_loader, Stream=Stream, Endless=Endless)
for room, _, name in (each.rpartition(".") for each in TESTS):
    SETTINGS[name] = importlib.import_module(f"tests.unit.{room}.test_{name}")
SETTINGS |= dict(measure=measure, planned=planned, make_plans=make_plans, nn=nn)
SETTINGS |= dict(predict_plan=predict_plan, two_speeds=two_speeds, layer_checkpoints=layer_checkpoints, torch=torch)
SETTINGS |= dict(save_steps=save_steps, Model=Model, SimulatedClock=SimulatedClock, device=device, copy=copy, timm=timm)
SETTINGS |= dict(batch_profile=batch_profile, layer_profile=layer_profile, inf=math.inf, nan=math.nan, np=np)
SETTINGS |= dict(evaluate_layout=evaluate_layout, OPT_CLUSTER=load_cluster(EXAMPLES / "clusters/a100-v100.toml"))
SETTINGS["OPT_350"] = layer_profiles.load_profile(EXAMPLES / "opt-350-a100-v100.json")
SETTINGS["SPLIT"] = make_plans(two_speeds.machines("fast"), two_speeds.profile(), global_batch=16)[0].plan
SETTINGS["CURVE"] = Curve.from_seconds([1.0, 2.0])
SETTINGS["MODEL"] = Transformer(layers=30, hidden=3072, vocabulary=51200, sequence=2048, heads=32)


def setting(expression: str, folder: Path) -> str:
    kinds = (ValueError, TypeError, RuntimeError, LookupError, OSError)
    return refusal(kinds, eval, expression, SETTINGS | {"folder": folder})


FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "batch_profile": (lambda path: batch_profiles.save_profile(batch_profile(), path), batch_profiles.load_profile),
    "layer_profile": (lambda path: layer_profiles.save_profile(layer_profile(), path), layer_profiles.load_profile),
    "plan": (lambda path: save_plan(plans.plan(), path), load_plan),
    "plan-interleaved": (lambda path: save_plan(plans.chunked("interleaved"), path), load_plan),
    "plan-zbv": (lambda path: save_plan(plans.chunked("zbv"), path), load_plan),
    "cluster": (lambda path: path.write_text(FILE), load_cluster),
}


def file(case: str, folder: Path) -> str:
    kind, _, change = case.partition(": ")
    save, load = FILES[kind]
    path = folder / "file"
    save(path)
    scope = {"content": path.read_text() if kind == "cluster" else json.loads(path.read_text())}
    before = json.dumps(scope)
    exec(change, {}, scope)
    assert json.dumps(scope) != before, "the change changes nothing"
    path.write_text(scope["content"] if kind == "cluster" else json.dumps(scope["content"]))
    message = refusal(ValueError, load, path)
    assert message.startswith(str(path)) and "\n" not in message and "pydantic" not in message, message
    return message


@pytest.mark.parametrize(
    "table, message", [("commands", command), ("flags", flags), ("settings", setting), ("files", file)]
)
def test_refusals(table, message, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    wrong = []
    for case, says in read_cases(Path(__file__).with_name(f"{table}.txt")):
        try:
            missing = missing_part(says, message(case, tmp_path))
        except (Exception, pytest.fail.Exception) as error:
            missing = repr(error)
        if missing is not None:
            wrong.append(f"{case}: {missing}")
    assert not wrong, "\n".join(wrong)
