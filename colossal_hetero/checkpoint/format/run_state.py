"""The state of a run that is not in tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RunState"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What one rank saves beside its tensors. What all ranks share is taken from rank 0."""

    epoch: int = 0
    """The epoch that the run is in."""
    plan: str = ""
    """Digest of the plan, or empty."""
    param_groups: Any = None
    """Settings of the optimizer, e.g. learning rates, as JSON."""
    common: Mapping[str, Any] = field(default_factory=dict)
    """States that all ranks share, e.g. of the scheduler and the loader, as JSON."""
    rank: Mapping[str, Any] = field(default_factory=dict)
    """States of this rank, as JSON."""
    binary: Mapping[str, bytes] = field(default_factory=dict)
    """States of this rank that are bytes, e.g. of random generators."""
