"""Runs one planner of a checkout of Sailor's repository; started by ``run_planners.py`` with the peers' own Python.

It reads a job from a JSON file and writes the plans that the planner returned, in the planner's own order, without
those that exceed memory by Sailor's count, as Sailor's own scripts do (``simulations/simulator.py``). It needs nothing
of this project. How each planner is called follows those scripts; where it differs, a comment says so.

    python child.py JOB.json ANSWER.json
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ZONE = "us-central1-a"
LAST_REGION = ZONE[:-2]


class _Machines(dict):  # type: ignore[type-arg]
    """Nodes by kind. The port of Metis asks for kinds that a cluster need not have."""

    def __missing__(self, kind: str) -> dict[str, int]:
        return {"num_nodes": 0}


class Job:
    """A model on a cluster, and the folder with the planners."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.peer: str = content["peer"]
        self.home = Path(content["home"])
        self.model: str = content["model"]
        self.batch: int = content["global_batch"]
        self.nodes: dict[str, tuple[int, int]] = {kind: (n, size) for kind, n, size in content["cluster"]}
        self.memory: dict[str, int] = content["memory_bytes"]
        self.seconds: float = content["seconds"]
        self.most: int = content["most_plans"]
        self.planner = self.home / "sailor" / "sailor" / "Planner"
        small = {"OPT-350": "opt_350", "GPT-Neo-2.7": "gpt_neo27"}[self.model]
        path = self.planner / "simulations" / "configs" / f"training_config_{small}.json"
        self.training: dict[str, Any] = json.loads(path.read_text())
        self.training["global_batch_size"] = self.batch
        self.training_path = Path(content["scratch"]) / "training.json"
        self.training_path.write_text(json.dumps(self.training))
        self.scratch = Path(content["scratch"])

    def machines(self) -> dict[str, Any]:
        """For AMP, Metis and FlashFlex."""
        found: dict[str, Any] = _Machines(
            (kind, {"num_nodes": n, "gpus_per_node": size, "mem_per_gpu": self.memory[kind]})
            for kind, (n, size) in self.nodes.items()
        )
        found["zone"] = ZONE
        return found

    def one_kind(self, *, single: bool = False) -> dict[str, Any]:
        """For planners of equal devices: the nodes of the only kind; with ``single``, each GPU is a node."""
        ((kind, (n, size)),) = self.nodes.items()
        n, size = (n * size, 1) if single else (n, size)
        fields = {"gpu_type": kind, "num_nodes": n, "gpus_per_node": size, "mem_per_gpu": self.memory[kind]}
        return {**fields, "zone": ZONE}

    def baseline(self, module: str) -> Any:
        return importlib.import_module(f"sailor.Planner.baselines.{module}")

    def profiles(self, peer: str) -> Path:
        return self.planner / "baselines" / peer / "profiles" / self.model


def sailor(job: Job) -> list[dict[str, Any]]:
    library = job.planner / "simulations"
    if not list(library.glob("libplanner*")):
        build_sailor(job.planner / "sailor_planner" / "cpp_src", library)
    sys.path.insert(0, str(library))
    planners = importlib.import_module("sailor.Planner.sailor_planner.cpp_src.planner")
    # Its constructor builds the library with make for Python 3.10; it is built above.
    planners.os.system = lambda command: 0
    # It uses fewer than all quotas as data-parallel degree, so they are twice what there is.
    quotas = {kind: {ZONE: 2 * n * size} for kind, (n, size) in job.nodes.items()}
    path = job.scratch / "quotas.json"
    path.write_text(json.dumps(quotas))
    profiles = f"{job.planner}/sailor_planner/profiles/{job.model}/"
    planner = planners.SailorPlanner(profiles, str(job.training_path), str(path), "throughput", False)
    cluster: dict[str, Any] = {f"{kind}_{ZONE}": n * size for kind, (n, size) in job.nodes.items()}
    return list(planner.get_sorted_plans(cluster_config={**cluster, "max_cost": 0.0, "min_throughput": 0.0}))


def build_sailor(source: Path, target: Path) -> None:
    """Builds the C++ library; needs g++, jsoncpp and pybind11."""
    pybind = importlib.import_module("pybind11")
    name = f"libplanner{sysconfig.get_config_var('EXT_SUFFIX')}"
    files = ["planner.cpp", "training.cpp", "utils/read_json.cpp", "utils/network_utils.cpp", "planner_utils.cpp"]
    folders = [f"-I{pybind.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    command = ["g++", "-O3", "-fPIC", "-shared", *folders, *files, "-ljsoncpp", "-o", str(target / name)]
    subprocess.run(command, cwd=source, check=True)


def amp(job: Job) -> list[dict[str, Any]]:
    planner = job.baseline("AMP.amp_planner").AMPPlanner(str(job.profiles("AMP")))
    return list(planner.get_sorted_plans(job.machines(), job.training))


def metis(job: Job) -> list[dict[str, Any]]:
    module = job.baseline("Metis.metis_planner")
    # The port names its kinds of GPU, A100-40 and V100-16, and its time limit in the source.
    loader, kinds = module.ProfileDataLoader, list(job.nodes)
    module.ProfileDataLoader = lambda folder, gpu_list: loader(folder, gpu_list=kinds)
    module.TIME_BUDGET_SEC = job.seconds
    planner = module.MetisPlanner(str(job.profiles("Metis")), str(job.training_path))
    plans = planner.get_sorted_plans(job.machines(), job.training)
    return [{**each, "iter_time": each["iter_time"] / 1e3} for each in plans]  # Its times are in milliseconds.


def flashflex(job: Job) -> list[dict[str, Any]]:
    module = job.baseline("FlashFlex.flashflex_planner")
    path = job.planner / "baselines" / "FlashFlex" / "src" / "machine_amounts.json"
    return list(module.FlashFlexPlanner(str(path)).get_sorted_plans(job.machines(), job.training))


def dtfm(job: Job) -> list[dict[str, Any]]:
    module = job.baseline("DTFM.dtfm_planner")
    importlib.import_module("random").seed(0)
    importlib.import_module("numpy").random.seed(0)
    sizes = json.loads((job.planner / "llm_info.json").read_text())
    planner = module.DTFMPlanner("", str(job.training_path), sizes, False)
    cluster: dict[str, Any] = {f"{kind}_{ZONE}": n * size for kind, (n, size) in job.nodes.items()}
    cluster["gpu_types"] = list(job.nodes)
    cluster["gpus_per_node"] = {kind: size for kind, (_, size) in job.nodes.items()}
    return list(planner.get_sorted_plans(cluster, job.training))


def atlas(job: Job) -> list[dict[str, Any]]:
    module = job.baseline("Atlas.atlas_planner")
    ((kind, (n, size)),) = job.nodes.items()
    sizes = json.loads((job.planner / "llm_info.json").read_text())
    path = job.scratch / "times.json"
    path.write_text(json.dumps({job.model: simulator_times(job)}))
    planner = module.AtlasPlanner(str(path), str(job.training_path), sizes, False, "throughput")
    return list(planner.get_sorted_plans({f"{kind}_{ZONE}": n * size, "gpus_per_node": size, "gpu_type": kind}, {}))


def varuna(job: Job) -> list[dict[str, Any]]:
    module = job.baseline("Varuna.varuna_planner")
    ((kind, _),) = job.nodes.items()
    path = job.profiles("Varuna") / kind / "profile_1.json"
    # It plans with the number of nodes as that of GPUs and without tensor parallelism: each GPU is a node.
    return list(module.VarunaPlanner(str(path), "throughput").get_sorted_plans(job.one_kind(single=True), job.training))


def piper(job: Job) -> list[dict[str, Any]]:
    module = job.baseline("Piper.piper_planner")
    ((kind, _),) = job.nodes.items()
    os.chdir(job.scratch)
    planner = module.PiperPlanner(str(job.profiles("Piper") / kind / "profile.json"))
    return list(planner.get_sorted_plans(job.one_kind(), job.training))


def galvatron(job: Job) -> list[dict[str, Any]]:
    source = job.planner / "baselines" / "Galvatron" / "csrc"
    name = f"galvatron_dp_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not (source / name).exists():
        pybind = importlib.import_module("pybind11")
        folders = [f"-I{pybind.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
        command = ["g++", "-O3", "-shared", "-std=c++17", "-fPIC", *folders, "dp_core.cpp", "-o", name]
        subprocess.run(command, cwd=source, check=True)
    sys.path.insert(0, str(source))
    module = job.baseline("Galvatron.galvatron_planner")
    ((kind, _),) = job.nodes.items()
    planner = module.GalvatronPlanner(str(job.training_path), str(job.profiles("Galvatron") / kind), "throughput")
    return list(planner.get_sorted_plans(job.one_kind(), job.training))


PLANNERS = {
    "Sailor": sailor,
    "AMP": amp,
    "Metis": metis,
    "FlashFlex": flashflex,
    "DTFM": dtfm,
    "Atlas": atlas,
    "Varuna": varuna,
    "Piper": piper,
    "Galvatron": galvatron,
}


def simulator_times(job: Job) -> dict[str, Any]:
    folder = job.planner / "sailor_planner" / "profiles" / job.model
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/profile.json")}


def fitting(job: Job, plans: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The first plans that fit in memory by Sailor's count, and how many before them did not."""
    module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
    sizes = json.loads((job.planner / "llm_info.json").read_text())
    simulator = module.Simulator(str(job.home), job.training, sizes, False, {job.model: simulator_times(job)}, ZONE)
    kept: list[dict[str, Any]] = []
    too_large = 0
    for plan in plans:
        try:
            fits = simulator.check_config_fits(plan)
        except (KeyError, IndexError):
            fits = False
        if fits:
            kept.append(plan)
        else:
            too_large += 1
        if len(kept) >= job.most:
            break
    return kept, too_large


def plain(job: Job, plan: dict[str, Any]) -> dict[str, Any]:
    """The plan as its own keys, in a form that JSON can hold; grids have their pipelines written out."""
    module = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
    written = module.convert_homogeneous(plan, job.training).to_dict()
    for name in ("iter_time", "iteration_time"):
        if plan.get(name):
            written["own_seconds"] = float(plan[name])
    if "own_seconds" not in written and plan.get("estimated_throughput"):
        written["own_seconds"] = 1 / float(plan["estimated_throughput"])
    return dict(written)


def main() -> None:
    job = Job(json.loads(Path(sys.argv[1]).read_text()))
    os.environ["SAILOR_PATH"] = str(job.home)
    sys.path.insert(0, str(job.home / "sailor"))
    prices = importlib.import_module("sailor.Planner.simulations.constants").GPU_PRICES
    for kind in job.nodes:
        # Prices are used for costs only, and some kinds have none.
        prices.setdefault(kind, {ZONE: 1.0})
    start = time.monotonic()
    plans = PLANNERS[job.peer](job)
    seconds = time.monotonic() - start
    kept, too_large = fitting(job, plans)
    answer = {
        "seconds": seconds,
        "returned": len(plans),
        "too_large": too_large,
        "plans": [plain(job, each) for each in kept],
    }
    Path(sys.argv[2]).write_text(json.dumps(answer, default=lambda each: each.item()))


if __name__ == "__main__":
    main()
