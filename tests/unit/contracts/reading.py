"""Names of Colossal-AI and torch: what their sources define, and which private ones this package uses.

Definitions are read from the sources, because this package replaces some of them while it runs.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import colossal_hetero

FOREIGN = ("colossalai", "torch")
OF_PYTHON = {"_fields", "_getframe"}  # documented
Function = ast.FunctionDef | ast.AsyncFunctionDef
Nodes = dict[str, ast.AST | None]


@cache
def definitions(owner: Any) -> Nodes:
    """Names that a module, or a class with its parents, has or sets, each with its definition; None: not in Python."""
    if not inspect.isclass(owner):
        return dict.fromkeys(set(dir(owner)) - set(own_names()[1])) | defined_by(owner)
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
    """Last names of what a function calls, in the order of its lines."""
    assert isinstance(function, Function)
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.end_lineno or 0, node.end_col_offset or 0))
    return [ast.unparse(node.func).rpartition(".")[2] for node in found]


# Uses in this package ------------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, list[ast.AST]]:
    """All nodes of each module of this package."""
    names = [each.name for each in pkgutil.walk_packages(colossal_hetero.__path__, "colossal_hetero.")]
    return {each: list(ast.walk(_source(importlib.import_module(each)))) for each in names if "__main__" not in each}  # type: ignore[arg-type]


@cache
def own_names() -> tuple[set[str], set[str]]:
    """Names that this package defines, and those that it sets on objects that are not its own."""
    every = [(name, node) for each in modules() for name, node in defined_by(sys.modules[each]).items()]
    read_or_set = [node for nodes in modules().values() for node in nodes if isinstance(node, ast.Attribute)]
    stores = [node for node in read_or_set if isinstance(node.ctx, ast.Store)]
    on_self = {node.attr for node in stores if ast.unparse(node.value) == "self"}
    own = on_self | {name for name, node in every if not isinstance(node, ast.Attribute)}
    return own, {node.attr for node in stores} - on_self


def uses() -> Iterator[tuple[str, str, str]]:
    """``(module, owner, name)`` of each private name that this package uses; ``owner`` is "" if it is not known."""
    for module, nodes in modules().items():
        aliases = _aliases(nodes)
        inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            full = _dotted(node, aliases)
            if full is not None:
                owner, _, name = full.rpartition(".")
                if not (is_public(full) or full in sys.modules or hasattr(builtins, name) or name.startswith("__")):
                    yield module, owner, name
            elif isinstance(node, ast.Attribute | ast.Constant) and id(node) not in inside:
                name = node.attr if isinstance(node, ast.Attribute) else node.value
                if isinstance(name, str) and name.isidentifier() and _is_private(name) and name not in own_names()[0]:
                    yield module, "", name
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
                owner = _dotted(node.args[0], aliases)
                yield from ((module, owner, each.arg) for each in node.keywords if owner and each.arg)
            elif isinstance(node, ast.ClassDef) and hasattr(sys.modules[module], node.name):
                yield from ((module, *each) for each in _of_parents(getattr(sys.modules[module], node.name), node))


def _of_parents(kind: type, node: ast.AST) -> Iterator[tuple[str, str]]:
    """Names of foreign parents that a class of this package overrides, reads or sets."""
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
    used = {part.attr for part in parts if isinstance(part.value, ast.Name) and part.value.id == "self"}
    for parent in kind.__mro__[1:]:
        owner = f"{parent.__module__}.{parent.__qualname__}"
        if owner.startswith(FOREIGN):
            homes = (module for name, module in sys.modules.items() if name.startswith("colossalai."))
            is_exported = any(parent.__name__ in getattr(home, "__all__", ()) for home in homes)
            is_internal = owner.startswith("colossalai") and not is_exported
            for name in sorted((used | set(vars(kind))) & set(defined_by(parent))):
                if _is_private(name) or (is_internal and not name.startswith("__")):
                    yield owner, name


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


def is_public(full: str) -> bool:
    """True if torch documents ``full``, as far as spelling tells, or a package of Colossal-AI exports it."""
    parts = full.split(".")
    if any(_is_private(part) or part in ("distributed_c10d", "rendezvous") for part in parts):
        return False
    homes = [(sys.modules.get(".".join(parts[:end])), parts[end]) for end in range(1, len(parts))]
    exported = any(name in getattr(home, "__all__", ()) for home, name in homes)
    return parts[0] == "torch" or len(parts) == 1 or full in sys.modules or exported


def _aliases(nodes: list[ast.AST]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(each.asname, each.name) if each.asname else (each.name.split(".")[0],) * 2 for each in node.names]
            found |= {alias: name for alias, name in names if name.startswith(FOREIGN)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(FOREIGN) and not node.level:
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    start = _dotted(node.value, aliases) if isinstance(node, ast.Attribute) else None
    return f"{start}.{node.attr}" if isinstance(node, ast.Attribute) and start else None


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_") and name not in OF_PYTHON
