"""A lower bound on the time of an iteration of all plans, of any schedule and in any search space: work over speed.

Every block runs forward and backward for every sample, on some device. In a tensor-parallel group of t devices whose
passes of s samples take T, each sample takes at least t · T / s of device time. A kind of device takes at least the
smallest of these, over all degrees and measured micro-batches (between two of them, times are interpolated, so none is
smaller), and a device that reaches the share v of its kind's speed gives v seconds per second. Linear programming
divides the samples of each block over the kinds so that the last device ends as early as possible. No plan ends
earlier: it has whole stages, fills its pipelines, and communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array, eye_array, kron

from ..cluster.topology import Topology
from ..profile.layer_profile import ModelProfile

__all__ = ["WorkBound"]

ROUNDING = 1e-9


class WorkBound:
    """Work over speed; has the methods of :class:`.IterationBound`.

    Args:
        topology: Machines; plans may leave some out.
        profile: Times of the model's layers on their kinds.
        degrees: Tensor-parallel degrees that plans may have.
        global_batch: Samples per iteration.
    """

    def __init__(self, topology: Topology, profile: ModelProfile, degrees: Sequence[int], global_batch: int) -> None:
        speeds: dict[str, float] = {}
        for device in topology.devices:
            speeds[device.kind.name] = speeds.get(device.kind.name, 0.0) + device.speed
        rows, speed = [], []
        for name, each in speeds.items():
            forms = [
                (degree, size)
                for degree in set(degrees) & set(profile.tensor_parallel_degrees(name))
                for size in profile.micro_batches(name, degree)
            ]
            if forms:
                found = [(profile.costs(name, degree, size), degree / size) for degree, size in forms]
                rows.append(np.min([(cost.forward_seconds + cost.backward_seconds) * by for cost, by in found], axis=0))
                speed.append(each)
        kinds, blocks = np.shape(rows)
        # Variables: the share of each block's samples that each kind runs, and the seconds of an iteration per sample.
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
        self._seconds = float(solved.fun) * global_batch * (1 - ROUNDING)

    def seconds(self, below: float, *, enough: float = np.inf, time_limit_seconds: float = np.inf) -> float:
        """The bound; not larger than ``below``. It is known at once, so there is nothing to stop early."""
        return min(self._seconds, below * (1 - ROUNDING))
