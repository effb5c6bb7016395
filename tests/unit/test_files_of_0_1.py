"""Files that version 0.1 wrote load as before."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from colossal_hetero.balance.decide.costs import Costs, Traffic, Volume
from colossal_hetero.balance.measure.cost_cache import CostCache
from colossal_hetero.planner.batches.batch_profile import load_profile
from colossal_hetero.planner.plans.plan import load_plan
from colossal_hetero.planner.profile.layer_profile import load_model_profile
from tests.support.paths import REPOSITORY

FILES = REPOSITORY / "tests" / "support" / "files_0_1"


def test_plan() -> None:
    plan = load_plan(FILES / "plan.json")
    content = json.loads((FILES / "plan.json").read_text())
    assert plan.layers_per_stage == (5, 5, 14) and len(plan.replicas) == 4
    assert plan.iteration_seconds == content["iteration_seconds"]
    assert plan.synchronization_seconds == content["synchronisation_seconds"]
    assert plan.replicas[0].stages[2].forward_seconds == content["replicas"][0]["stages"][2]["forward_seconds"]


def test_cost_cache(tmp_path: Path) -> None:
    """The same context gives the same file name as in 0.1, because its fields have the same names and formats."""
    context = json.loads((FILES / "cost_cache.json").read_text())["circumstances"]
    assert context["traffic"] == [asdict(Traffic(Volume(1, 2), Volume(3, 4), Volume(5, 6)))]
    cache = CostCache(str(tmp_path))
    path = cache.path(context)
    assert path is not None and path.name == "costs-c243b38943be31de.json"
    shutil.copy(FILES / "cost_cache.json", path)
    assert cache.read(context) == Costs(0.1, 0.2, 0.3, 0.4, 1.5, 1.1)


def test_layer_profile() -> None:
    assert load_model_profile(REPOSITORY / "examples" / "plans" / "opt-350-a100-v100.json").blocks == 24


def test_batch_profile() -> None:
    profile = load_profile(REPOSITORY / "examples" / "zero" / "profiles" / "a100-80-a100-40.json")
    assert len(profile.ranks) == 8
