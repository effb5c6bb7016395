"""The rooms of the package: how many modules a folder holds, and which folders each of them may import.

``docs/architecture.md`` describes the same rooms in words.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PACKAGE = "colossal_hetero"
MAX_MODULES = 12

RULES: dict[str, set[str]] = {
    "io": set(),
    "processes": set(),
    "module_proxy": set(),
    "cpu": {"module_proxy"},
    "corrections": set(),
    "user_hooks": set(),
    "accelerator": {"cpu", "corrections", "processes"},
    "gpu_over_gloo": {"accelerator", "cpu"},
    "planner/cluster": {"io"},
    "planner/profile": {"io", "planner/cluster"},
    "planner/batches": {"io", "planner/cluster"},
    "planner/redivision": {"planner/batches"},
    "planner/stages": {"planner/cluster", "planner/profile"},
    "planner/schedules": {"io", "planner/cluster", "planner/profile", "planner/stages"},
    "planner/plans": {
        *("io", "planner/cluster", "planner/profile", "planner/stages", "planner/schedules"),
    },
    "planner/layout_line": {"io", "planner/schedules", "planner/plans"},
    "planner/chunks": {
        *("io", "planner/cluster", "planner/profile", "planner/stages", "planner/schedules", "planner/plans"),
    },
    "planner/slots": {"planner/cluster", "planner/profile"},
    "planner/candidates": {
        *("planner/cluster", "planner/profile", "planner/stages", "planner/plans", "planner/slots"),
    },
    "planner/bounds": {"planner/profile", "planner/cluster", "planner/plans", "planner/slots"},
    "planner/search": {
        *("io", "planner/cluster", "planner/profile", "planner/stages", "planner/schedules"),
        *("planner/plans", "planner/chunks", "planner/slots", "planner/candidates", "planner/bounds"),
    },
    "planner/prices": {
        *("planner/cluster", "planner/profile", "planner/plans", "planner/slots", "planner/bounds", "planner/search"),
    },
    "planner/evaluation": {
        *("io", "planner/cluster", "planner/profile", "planner/schedules", "planner/layout_line", "planner/plans"),
        *("planner/chunks", "planner/slots", "planner/candidates", "planner/prices"),
    },
    "planner/report": {
        "io",
        "planner/evaluation",
        "planner/prices",
        "planner/cluster",
        "planner/profile",
        "planner/batches",
        "planner/stages",
        "planner/schedules",
        "planner/layout_line",
        "planner/plans",
    },
    "planner": {"planner/batches"},
    "layers": {"accelerator", "corrections", "user_hooks", "layers/dropout", "layers/inside_blocks"},
    "layers/dropout": set(),
    "layers/inside_blocks": {"user_hooks"},
    "layers/unit_exchange": {"layers", "layers/dropout"},
    "layers/language_head": {"corrections", "layers"},
    "layers/resharding": {"layers", "layers/dropout"},
    "balance/config": set(),
    "balance/decide": {"balance/config"},
    "balance/measure": {"io", "layers", "balance/config", "balance/decide"},
    "balance/report": {"io", "balance/decide", "balance/measure"},
    "balance": {
        *(
            "processes",
            "user_hooks",
            "layers",
            "layers/*",
            "balance/config",
            "balance/decide",
            "balance/measure",
            "balance/report",
        ),
    },
    "profiling": {"accelerator"},
    "profiling/batches": {"accelerator", "processes", "planner/*", "profiling"},
    "profiling/layers": {"accelerator", "layers", "processes", "planner/*", "profiling", "profiling/batches"},
    "data_parallel/training_loop": {"accelerator", "processes", "user_hooks", "profiling", "profiling/*"},
    "data_parallel/sampling": {"data_parallel/training_loop"},
    "data_parallel": {
        *("io", "accelerator", "processes", "planner/*", "profiling", "profiling/*"),
        *("data_parallel/training_loop", "data_parallel/sampling"),
    },
    "pipeline_parallel": {"io", "planner/*", "layers/dropout", "profiling", "profiling/*"},
    "probe": {"processes", "planner/cluster", "profiling"},
    "plugin": {"accelerator", "planner/batches", "data_parallel", "data_parallel/training_loop", "profiling/batches"},
    "plugin/overlap": {"accelerator"},
    "plugin/checkpoints": {"processes", "checkpoint", "checkpoint/contents", "plugin"},
    "plugin/resharding": {"layers/resharding", "checkpoint/contents", "profiling"},
    "plugin/unequal": {
        *("accelerator", "module_proxy", "planner/batches", "planner/plans", "data_parallel", "plugin"),
        "plugin/overlap",
    },
    "plugin/elastic/joining": {"planner/cluster", "planner/profile", "elastic"},
    "plugin/elastic": {
        *(
            "plugin/elastic/joining",
            "accelerator",
            "processes",
            "data_parallel",
            "pipeline_parallel",
            "plugin",
            "layers/dropout",
        ),
        *("planner/cluster", "planner/plans", "planner/profile", "profiling/layers"),
        *("checkpoint", "checkpoint/contents", "checkpoint/format", "elastic", "elastic/membership", "elastic/state"),
        *("elastic/restart", "plugin/unequal", "plugin/elastic/joining"),
    },
    "plugin/hybrid": {
        *("io", "processes", "accelerator", "gpu_over_gloo", "layers", "layers/inside_blocks", "planner/*"),
        *("balance", "balance/*"),
        *("profiling", "profiling/*", "data_parallel", "pipeline_parallel", "plugin", "plugin/overlap"),
        *("checkpoint", "plugin/checkpoints", "plugin/unequal", "elastic", "elastic/state", "plugin/elastic"),
        *("plugin/elastic/joining", "plugin/resharding"),
    },
    "plugin/zero": {
        "gpu_over_gloo",
        "processes",
        "accelerator",
        "planner/batches",
        "profiling",
        "profiling/*",
        "data_parallel",
        "plugin",
        "plugin/overlap",
        "plugin/checkpoints",
        "checkpoint",
    },
    "checkpoint/format": {"io"},
    "checkpoint/contents": {"accelerator", "profiling", "profiling/layers", "checkpoint/format"},
    "checkpoint/storage": {"checkpoint/format"},
    "checkpoint/saving": {"io", "checkpoint/format", "checkpoint/storage"},
    "checkpoint/reading": {"io", "checkpoint/format", "checkpoint/storage"},
    "checkpoint/placement": {"checkpoint/format"},
    "checkpoint": {"io", "accelerator", "processes", "checkpoint/*"},
    "elastic": set(),
    "elastic/state": {
        *("checkpoint", "checkpoint/format", "checkpoint/placement", "checkpoint/reading"),
        *("planner/cluster", "planner/plans"),
    },
    "elastic/membership": {"accelerator", "cpu"},
    "elastic/restart": {"elastic", "elastic/state", "checkpoint/format", "checkpoint/saving"},
    "elastic/supervisor": {"elastic"},
    "testing": {"io", "layers"},
    "commands": {"io", "planner/*", "checkpoint/storage"},
    "planner/imports": {"io", "planner/cluster", "planner/profile"},
    "commands/profiles": {
        *("io", "processes", "planner/*", "probe", "profiling", "profiling/*", "commands"),
    },
    "commands/planning": {"io", "planner/*", "commands"},
    "commands/jobs": {
        *("io", "checkpoint/format", "checkpoint/storage", "checkpoint/reading", "elastic", "elastic/supervisor"),
        "commands",
    },
    "cli": {"commands", "commands/*"},
}
"""By room: the rooms that it may import. ``planner/*`` is every room in ``planner/``."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in (REPOSITORY / PACKAGE).rglob("*.py")}


def room_of(module: str) -> str:
    """The folder of a module. A module directly in the package is a separate room, and so is ``balance/config``."""
    path = MODULES[module].relative_to(REPOSITORY / PACKAGE)
    if path.parts[:-1] == () or path.with_suffix("").as_posix() in RULES:
        return path.with_suffix("").as_posix()
    return path.parent.as_posix()


def imported(module: str) -> Iterator[str]:
    """Modules of the package that ``module`` imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if name in MODULES or source in MODULES:
                    yield name if name in MODULES else source


def test_every_room_has_a_rule() -> None:
    assert {room_of(module) for module in MODULES} - {"__init__"} == set(RULES)


def test_a_folder_holds_few_modules() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MAX_MODULES, f"{folder} holds {len(modules)} modules: {', '.join(sorted(modules))}"


@pytest.mark.parametrize("room", RULES)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    allowed = {room, "__init__"}
    for rule in RULES[room]:
        folder = rule.removesuffix("/*")
        allowed |= {rule} if folder == rule else {each for each in RULES if each.startswith(f"{folder}/")}
    for module in MODULES:
        if room_of(module) == room:
            wrong = {name for name in imported(module) if room_of(name) not in allowed}
            assert not wrong, f"{module} imports {', '.join(sorted(wrong))}"


def test_there_are_no_import_cycles() -> None:
    # A package's __init__ only re-exports names; modules import each other directly.
    graph = {module: set(imported(module)) for module, path in MODULES.items() if path.name != "__init__.py"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_no_two_classes_have_the_same_name() -> None:
    modules: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}
