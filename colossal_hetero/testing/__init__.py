"""Slow ranks on demand, CPU quotas, and shards in one process: for experiments and for users' own tests."""

from importlib import import_module
from typing import Any

__all__ = [
    "InProcessLinear",
    "InProcessShard",
    "Stragglers",
    "cpu_quota",
    "inject_stragglers",
    "parse_slowdowns",
    "shard_in_process",
]

from .stragglers import cpu_quota

_MODULES = {
    "InProcessLinear": "in_process",
    "InProcessShard": "in_process",
    "shard_in_process": "in_process",
    "Stragglers": "stragglers",
    "inject_stragglers": "stragglers",
    "parse_slowdowns": "stragglers",
}
"""Modules of names that are loaded on first use, because that takes seconds."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
