"""Contracts with Colossal-AI and torch: each private name that this package uses is there, with its parameters, and
calls are in the order that it relies on. A version that moved something is told here, and not where a run fails.

A new use of a private name needs a line in ``names.txt``.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _Action

import colossal_hetero
from colossal_hetero import doctor
from colossal_hetero.colossalai_support import gpu_over_gloo
from colossal_hetero.data_parallel import busy_timer
from colossal_hetero.elastic import rendezvous
from colossal_hetero.profiling import local_collectives
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")  # in sources of others
PACKAGE = REPOSITORY / "colossal_hetero"

ORDERS = dict(line.split(": ") for line in Path(__file__).with_name("orders.txt").read_text("utf-8").splitlines())
"""By function: calls in the order that methods and classes of this package rely on, which it puts in their place."""


def contracts() -> dict[str, dict[str, list[str] | None]]:
    text = re.sub(r"^#.*$", "", Path(__file__).with_name("names.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, dict[str, list[str] | None]] = {}
    for owner, names in re.findall(r"^(\S+):((?:.|\n(?=\s))*)", text, re.MULTILINE):
        each = re.findall(r"(\w+)(\(.*?\))?", names)
        found[owner] = {name: re.findall(r"\w+", given) if given else None for name, given in each}
    return found


CONTRACTS = contracts()


@pytest.mark.parametrize("owner", CONTRACTS)
def test_names_are_there(owner: str) -> None:
    try:
        there = definitions(resolve_name(owner))
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{owner} is gone ({error}): grep for it in colossal_hetero")
    for name, given in CONTRACTS[owner].items():
        assert name in there, f"{owner}.{name} is gone"
        if given is not None:
            names, needed = parameters(there[name])
            is_same = [each for each in names if each in given] == given and needed <= set(given)
            assert is_same, f"{owner}.{name} takes {names}, and no longer {given}"


@pytest.mark.parametrize("function", ORDERS)
def test_calls_are_in_order(function: str) -> None:
    owner, _, name = function.rpartition(".")
    found = calls(definitions(resolve_name(owner))[name])
    rest = iter(found)
    for call in ORDERS[function].split():
        assert call in rest, f"{function} calls {' '.join(found)}, and no longer {ORDERS[function]} in this order"


def test_overrides_take_what_their_parents_take() -> None:
    for kind, name, own, theirs in overrides():
        (names, needed), (expected, _) = parameters(own), parameters(theirs)
        passes_on = own.args.vararg is not None or own.args.kwarg is not None
        assert needed <= set(expected), f"{kind}.{name} needs {needed - set(expected)}, which its parent does not have"
        assert passes_on or set(expected) <= set(names), f"{kind}.{name} lacks {set(expected) - set(names)}"


def test_every_private_name_has_a_contract() -> None:
    """Imported names and attributes with an underscore in front that this package does not define."""
    known = {part for owner, names in CONTRACTS.items() for part in (*owner.split("."), *names)} | OF_PYTHON | ALSO_OURS
    own, used = set[str](), dict[str, str]()
    for module, nodes in modules().items():
        for node in nodes:
            if isinstance(node, Function | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                own |= {node.attr} if is_set_on_self(node) else set()
                used.setdefault(node.attr, module)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("colossalai", "torch")):
                used |= {alias.name: module for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used.setdefault(node.value, module)
    kinds = {kind for module in modules() for kind in vars(sys.modules[module]).values() if isinstance(kind, type)}
    parents = {each for kind in kinds for each in kind.__mro__ if each.__module__.startswith("colossalai")}
    own -= {name for parent in parents for name in defined_by(parent)}
    missing = {name: where for name, where in used.items() if re.match(r"_[^_]", name) and name not in known | own}
    assert not missing, f"add to names.txt the names that these modules use: {missing}"


def test_the_rendezvous_handles_every_action_of_torch() -> None:
    files = [path.name for path in PACKAGE.rglob("*.py") if "dynamic_rendezvous" in path.read_text(encoding="utf-8")]
    ends = {_Action.SYNC, _Action.FINISH, _Action.ERROR_CLOSED, _Action.ERROR_TIMEOUT}
    assert (files, set(_Action)) == (["rendezvous.py"], ends | set(rendezvous._CHANGES))


def test_every_collective_of_training_is_replaced_and_watched() -> None:
    """Under another name, one rank's trial would wait for the others, and waiting would count as work."""
    callers = ("distributed.fsdp._runtime_utils", "distributed.fsdp._flat_param", "nn.modules._functions")
    texts = [Path(resolve_name(f"torch.{caller}").__file__ or "").read_text(encoding="utf-8") for caller in callers]
    kinds = "all_gather|all_reduce|broadcast|reduce_scatter|all_to_all"
    called = {name for text in texts for name in re.findall(rf"\bdist\.((?:{kinds})\w*)\(", text)}
    assert len(called) > 3
    for known in (local_collectives._NAMES, busy_timer.COLLECTIVES, doctor.COLLECTIVES):
        assert called <= set(known)
    assert called - {"all_reduce", "broadcast"} <= set(gpu_over_gloo.OUTPUTS)  # Gloo has these two on GPUs


OF_PYTHON = {"_fields", "_getframe"}  # documented
# Of our classes as well, or parts of names:
ALSO_OURS = {"_load", "_lock", "_name", "_options", "_global", "_of_", "_proj"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Nodes = dict[str, ast.AST | None]


@cache
def definitions(owner: Any) -> Nodes:
    """Names that a module, or a class with its parents, has or sets, each with its definition; None: not in Python."""
    if not inspect.isclass(owner):
        return dict.fromkeys(set(dir(owner)) - set_on_others()) | defined_by(owner)
    found: Nodes = {}
    for part in reversed(owner.__mro__):
        found |= defined_by(part) or dict.fromkeys(dir(part))
    return found


@cache
def defined_by(owner: Any) -> Nodes:
    tree, found = _source(owner), {}
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, Function | ast.ClassDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id if isinstance(node, ast.Name) else node.attr, node)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not inspect.isclass(owner):
            found |= {(alias.asname or alias.name).partition(".")[0]: node for alias in node.names}
    return found


@cache
def _source(owner: Any) -> ast.AST | None:
    """The syntax tree of a module or a class; None if it is not written in Python."""
    if isinstance(owner, ModuleType):
        file = getattr(owner, "__file__", None) or ""
        return ast.parse(Path(file).read_text(encoding="utf-8")) if file.endswith(".py") else None
    node = _source(sys.modules.get(owner.__module__)) if isinstance(owner, type) else None
    for name in owner.__qualname__.split(".") if node is not None else ():
        parts = getattr(node, "body", ())
        node = next((each for each in parts if isinstance(each, ast.ClassDef) and each.name == name), None)
    return node


def parameters(function: ast.AST | None) -> tuple[list[str], set[str]]:
    """Names of the parameters without ``self``, and those that must be given."""
    assert isinstance(function, Function), "it is not a function"
    given = function.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    optional = set(positional[len(positional) - len(given.defaults) :])
    optional |= {each.arg for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is not None}
    names = [*positional, *(each.arg for each in given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")], set(names) - optional - {"self", "cls"}


def calls(function: ast.AST | None) -> list[str]:
    assert isinstance(function, Function)
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
    return [ast.unparse(node.func).rpartition(".")[2] for node in found]


@cache
def modules() -> dict[str, list[ast.AST]]:
    names = [each.name for each in pkgutil.walk_packages(colossal_hetero.__path__, "colossal_hetero.")]
    return {each: list(ast.walk(_source(importlib.import_module(each)))) for each in names if "__main__" not in each}  # type: ignore[arg-type]


def is_set_on_self(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


@cache
def set_on_others() -> set[str]:
    """Names that this package sets on objects that are not its own."""
    found = [node for nodes in modules().values() for node in nodes if isinstance(node, ast.Attribute)]
    stores = {node.attr for node in found if isinstance(node.ctx, ast.Store) and not is_set_on_self(node)}
    return stores - {node.attr for node in found if is_set_on_self(node)}


def overrides() -> Iterator[tuple[str, str, Any, Any]]:
    """``(class, method, own, parent's)`` of each method of Colossal-AI that a class of this package overrides."""
    for module in modules():
        for kind in vars(sys.modules[module]).values():
            for name, node in defined_by(kind).items() if isinstance(kind, type) and kind.__module__ == module else ():
                for parent in kind.__mro__[1:]:
                    is_theirs = parent.__module__.startswith(("colossalai", "torch.distributed"))
                    theirs = defined_by(parent).get(name) if is_theirs else None
                    if isinstance(node, Function) and isinstance(theirs, Function) and not name.startswith("__"):
                        yield f"{module}.{kind.__qualname__}", name, node, theirs
