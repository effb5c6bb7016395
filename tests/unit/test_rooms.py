"""The rooms of the package: which of them may import which, and how large and how deep they are.

``docs/architecture.md`` describes the same rooms in words.
"""

import ast
import itertools
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

PACKAGE = "colossal_hetero"
MAX_ROOMS = 12
MAX_MODULES = 25

PLANNER = {"planner/cluster", "planner/profile", "planner/stages", "planner/cost", "planner/solver"}

RULES: dict[str, set[str]] = {
    "common": set(),
    "colossalai_support": {"common"},
    "layers": {"colossalai_support"},
    "planner/cluster": {"common"},
    "planner/profile": {"common", "planner/cluster"},
    "planner/stages": {"planner/cluster", "planner/profile"},
    "planner/cost": {"common", "planner/cluster", "planner/profile", "planner/stages"},
    "planner/solver": {"common", "planner/cluster", "planner/profile", "planner/stages", "planner/cost"},
    "planner/batches": {"common", "planner/cluster"},
    "planner/report": {"common", "planner/batches", *PLANNER},
    "planner": {"planner/batches"},
    "balance": {"common", "colossalai_support", "layers"},
    "profiling": {"common", "colossalai_support", "layers", "planner/cluster", "planner/profile", "planner/batches"},
    "data_parallel": {"common", "colossalai_support", "planner/batches", "profiling"},
    "checkpoint": {"common", "colossalai_support", "profiling"},
    "elastic": {"common", "colossalai_support", "checkpoint", "planner/cluster", "planner/cost"},
    "plugin": {"common", "colossalai_support", "planner/batches", "profiling", "data_parallel", "checkpoint", *PLANNER},
    "plugin/zero": {
        *("common", "colossalai_support", "planner/batches", "planner/cluster", "profiling", "data_parallel"),
        *("checkpoint", "plugin"),
    },
    "plugin/replicas": {"common", "colossalai_support", "planner/*", "data_parallel", "plugin", "plugin/zero"},
    "plugin/elastic": {
        *("common", "colossalai_support", "layers", "planner/*", "profiling", "data_parallel", "checkpoint", "elastic"),
        *("plugin", "plugin/replicas"),
    },
    "plugin/hybrid": {
        *("common", "colossalai_support", "layers", "balance", "planner/*", "profiling", "data_parallel", "checkpoint"),
        *("elastic", "plugin", "plugin/zero", "plugin/replicas", "plugin/elastic"),
    },
    "cli": {"common", "planner/*", "profiling", "checkpoint", "elastic"},
    "testing": {"common", "layers"},
}
"""By room: the rooms that it may import. ``planner/*`` is every room in ``planner/``."""

PURE = {"balance": {"divide", "modes", "optimum", "plan", "ratios", "work_times"}, "planner": None}
"""By room: the modules that decide, so they import no torch; None: all of them."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in (REPOSITORY / PACKAGE).rglob("*.py")}


def room_of(module: str) -> str:
    """The folder of a module, if it is a room with rules of its own; otherwise the folder above."""
    folder = MODULES[module].relative_to(REPOSITORY / PACKAGE).parent
    return folder.as_posix() if folder.as_posix() in RULES else folder.parts[0] if folder.parts else ""


@cache
def nodes_of(module: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def imported(module: str) -> Iterator[str]:
    """Modules of the package that ``module`` imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    for name in imported_names(module):
        yield from [each for each in (name, name.rpartition(".")[0]) if each in MODULES][:1]


def imported_names(module: str) -> Iterator[str]:
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def test_there_are_few_rooms_with_few_modules_each_on_two_levels() -> None:
    assert {room_of(module) for module in MODULES} - {""} == set(RULES)
    tops = {room.partition("/")[0] for room in RULES}
    assert len(tops) <= MAX_ROOMS, f"{len(tops)} rooms: a newcomer cannot learn more than {MAX_ROOMS}; merge two"
    deep = sorted(module for module in MODULES if module.count(".") > 3)
    assert not deep, f"{', '.join(deep)}: put them one folder higher; folders in folders need interfaces between them"
    for folder in {path.parent for path in MODULES.values()}:
        modules = sorted(path.stem for path in folder.glob("*.py") if path.name != "__init__.py")
        assert len(modules) <= MAX_MODULES, (
            f"{folder.name}/ holds {len(modules)} modules: {', '.join(modules)}. A module is a subject of 150 to 450 "
            "lines: merge a small one into the module that imports it"
        )


@pytest.mark.parametrize("room", RULES)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    allowed = {room, ""}
    for rule in RULES[room]:
        allowed |= {each for each in RULES if each.startswith(rule[:-1])} if rule.endswith("/*") else {rule}
    for module in MODULES:
        if room_of(module) == room:
            wrong = sorted(name for name in imported(module) if room_of(name) not in allowed)
            assert not wrong, (
                f"{module} imports {', '.join(wrong)}, and {room} may import {', '.join(sorted(RULES[room]))} only: "
                "imports point one way, so that a room can be understood with those below it"
            )


def test_the_doctor_stands_alone_and_decisions_are_pure() -> None:
    # It watches scripts that use nothing of this package, and starts without Colossal-AI.
    assert set(imported("colossal_hetero.doctor")) == {"colossal_hetero.common.tables"}
    assert set(imported("colossal_hetero.common.tables")) == set()
    roots = {name.split(".")[0] for name in imported_names("colossal_hetero.doctor")} - {"colossal_hetero"}
    assert roots - sys.stdlib_module_names == {"torch", "rich"}
    for (room, names), (module, path) in itertools.product(PURE.items(), MODULES.items()):
        if module.split(".")[1:2] == [room] and (names is None or path.stem in names):
            wrong = {name for name in imported_names(module) if name.split(".")[0] in ("torch", "colossalai")}
            assert not wrong, f"{module} decides, so it must not import {', '.join(sorted(wrong))}"


def test_there_are_no_import_cycles() -> None:
    # A package's __init__ only re-exports names; modules import each other directly.
    graph = {module: set(imported(module)) for module, path in MODULES.items() if path.name != "__init__.py"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_no_two_classes_have_the_same_name() -> None:
    modules: dict[str, list[str]] = {}
    for module in MODULES:
        (tree, *_) = nodes_of(module)
        for node in tree.body:  # type: ignore[attr-defined]
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}
