"""Processes that end themselves with SIGKILL in a phase of training that a test chooses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from colossal_hetero.checkpoint.storage import FileOperations
from colossal_hetero.plugin.elastic import evaluations
from colossal_hetero.plugin.elastic.members import JobMember
from colossal_hetero.plugin.replicas.layer_sums import LayerSums
from colossal_hetero.plugin.replicas.replica_gradients import ReplicaGradients

__all__ = ["PHASES", "Kill", "phases"]

DOOM = "COLOSSAL_TEST_DOOM"
"""The environment variable with the path of a file: when it is there, the process ends in the phase that it names."""

PHASES: dict[str, tuple[Any, str, bool]] = {
    "forward": (None, "forward", False),
    "evaluation": (None, "forward", False),
    "backward": (torch.autograd, "backward", False),
    "sums": (LayerSums, "finish", False),
    "before commit": (ReplicaGradients, "commit", False),
    "after commit": (ReplicaGradients, "commit", True),
    "saving": (FileOperations, "write", True),
    "re-forming": (JobMember, "form", False),
    "formed": (JobMember, "form", True),
    "moving": (evaluations, "move_pieces", False),
    "moved": (evaluations, "move_pieces", True),
}
"""What is called in each phase: owner, name, and whether the process ends after it instead of before."""


@dataclass(frozen=True)
class Kill:
    """Where a member ends itself."""

    version: int
    """Optimizer steps that are done."""
    phase: str
    """One of :data:`PHASES`."""


@contextmanager
def phases(kill: Kill | None, version: Callable[[], int], block: type) -> Iterator[None]:
    """In the block, the process ends itself where ``kill`` says, or when the file of :data:`DOOM` is there.

    Args:
        version: optimizer steps that are done.
        block: class of the model's blocks.
    """
    doom = os.environ.get(DOOM)
    if kill is None and doom is None:
        yield
        return

    def check(phase: str) -> None:
        if phase in ("forward", "evaluation") and (phase == "forward") != torch.is_grad_enabled():
            return
        if kill is not None and kill.phase == phase and version() == kill.version:
            os.kill(os.getpid(), signal.SIGKILL)
        if doom is not None and os.path.exists(doom) and Path(doom).read_text() == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(function: Callable[..., Any], phase: str, after: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not after:
                check(phase)
            result = function(*args, **kwargs)
            if after:
                check(phase)
            return result

        return run

    # Functions that two phases watch are wrapped twice.
    with ExitStack() as stack:
        for phase, (owner, name, after) in PHASES.items():
            place = block if owner is None else owner
            stack.enter_context(patch.object(place, name, watched(getattr(place, name), phase, after)))
        yield
