"""Distance of a search from the best possible plan, and the decision to end it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array, eye_array, kron

from .iteration_bound import IterationBound
from .problem import Problem

__all__ = ["PLAIN", "Effort", "GapGoal", "WorkBound"]


# Work bound ----------------------------------------------------------------------------------------------------------
#
# Work over speed, for any schedule and search space. Every block runs forward and backward for every sample. If a
# tensor-parallel group of t devices takes T for s samples, each sample takes at least t · T / s of device time: of a
# kind of device, the smallest one over all degrees and measured micro-batches. A device at the share v of its kind's
# speed gives v seconds per second. Linear programming divides each block's samples so that the last device ends as
# early as possible; no plan ends earlier.


ROUNDING = 1e-9


class WorkBound:
    """Lower bound that is work over speed; has the methods of :class:`.IterationBound`."""

    def __init__(self, problem: Problem) -> None:
        profile = problem.profile
        speeds: dict[str, float] = {}
        for device in problem.topology.devices:
            speeds[device.kind.name] = speeds.get(device.kind.name, 0.0) + device.speed
        rows, speed = [], []
        for name, each in speeds.items():
            forms = [
                (degree, size)
                for degree in set(problem.degrees) & set(profile.tensor_parallel_degrees(name))
                for size in profile.micro_batches(name, degree)
            ]
            if forms:
                found = [(profile.costs(name, degree, size), degree / size) for degree, size in forms]
                rows.append(np.min([(cost.forward_seconds + cost.backward_seconds) * by for cost, by in found], axis=0))
                speed.append(each)
        kinds, blocks = np.shape(rows)
        # Variables: each kind's share of each block's samples, and the seconds of an iteration per sample.
        on_kinds = kron(eye_array(kinds), np.ones((1, blocks))).multiply(np.concatenate(rows))
        of_blocks = kron(np.ones((1, kinds)), eye_array(blocks))
        solved = linprog(
            np.append(np.zeros(kinds * blocks), 1.0),
            A_ub=block_array([[csr_array(on_kinds), csr_array(-np.array(speed)[:, None])]]),
            b_ub=np.zeros(kinds),
            A_eq=block_array([[csr_array(of_blocks), csr_array((blocks, 1))]]),
            b_eq=np.ones(blocks),
        )
        assert solved.status == 0, solved.message
        self._seconds = float(solved.fun) * problem.global_batch * (1 - ROUNDING)

    def seconds(self, below: float, *, enough: float = np.inf, time_limit_seconds: float = np.inf) -> float:
        """Lower bound, at most ``below``; known at once, so the other arguments change nothing."""
        return min(self._seconds, below * (1 - ROUNDING))


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Effort to find a plan, and to prove how good it is."""

    bound_seconds: float = 0.0
    """Time limit for a lower bound; 0: none is looked for."""
    gap: float | None = None
    """The search ends when no plan can be faster by more than this share (0.03: 3 %); None: it does not end early."""
    search_seconds: float = np.inf
    """No part of the search begins after this, once there is a plan."""

    def __post_init__(self) -> None:
        for name in ("bound_seconds", "gap", "search_seconds"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value}: must be at least 0")
        if self.gap is not None and self.bound_seconds == 0:
            raise ValueError(f"gap={self.gap} without time to find a bound; give bound_seconds, such as 5")


PLAIN = Effort()
"""The whole search, and no bound."""


@dataclass(eq=False)
class GapGoal:
    """Lower bound of one search, which is looked for only as far as needed."""

    bound: IterationBound | WorkBound
    effort: Effort
    _begin: float = field(default_factory=time.monotonic)
    _spent: float = 0.0

    def is_enough(self, seconds: float) -> bool:
        if time.monotonic() - self._begin > self.effort.search_seconds:
            return True
        if self.effort.gap is None:
            return False
        enough = seconds / (1.0 + self.effort.gap)
        return self._lower_bound(seconds, enough) >= enough

    def lower_bound(self, seconds: float) -> float:
        """Seconds that no plan is below, at most ``seconds``, the time of the fastest plan that was found."""
        return self._lower_bound(seconds, np.inf)

    def _lower_bound(self, seconds: float, enough: float) -> float:
        begin = time.monotonic()
        left = max(self.effort.bound_seconds - self._spent, 0.0)
        found = self.bound.seconds(seconds, enough=enough, time_limit_seconds=left)
        self._spent += time.monotonic() - begin
        return found
