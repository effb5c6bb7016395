"""What is decided before training: devices, their speed, and the batch that each gets. Free of torch."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Allocation": "batches.allocation",
    "Answer": "solver.search",
    "Curve": "batches.time_curve",
    "Plan": "cost.plan",
    "Problem": "solver.problem",
    "Replica": "cost.plan",
    "Share": "batches.allocation",
    "StagePlan": "cost.plan",
    "allocate": "batches.allocation",
    "load_cluster": "cluster.cluster_file",
    "load_plan": "cost.plan",
    "load_profile": "profile.layer_profile",
    "save_plan": "cost.plan",
    "search": "solver.search",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
