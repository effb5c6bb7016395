"""A tensor-parallel group with simulated times, which balances like a real group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs
from colossal_hetero.balance.decide.modes import decide
from colossal_hetero.balance.measure.speed import EqualWork, SpeedWatch

OTHER = 0.3
"""Seconds of work per rank and iteration that cannot be moved. The products of a rank take 0.7 s times its slowdown."""


class SimulatedGroup:
    """Ranks with given slowdowns, noise and a resizing overhead. They run the same state machines as real ranks."""

    def __init__(
        self, ranks: int, config: BalanceConfig, seed: int = 0, noise: float = 0.0, overhead: float = 0.0
    ) -> None:
        self.config, self.noise, self.overhead = config, noise, overhead
        self.random = np.random.default_rng(seed)
        self.equal_work = [EqualWork(config.patience) for _ in range(ranks)]
        self.watches = [SpeedWatch(config) for _ in range(ranks)]
        self.plan = BalancePlan.idle(ranks)
        self.flag = False
        self.exchanges = 0
        self.seconds = 0.0
        """Total time of all iterations."""

    def iterate(self, slowdowns: Sequence[float]) -> None:
        """Run one iteration; a plan that is decided at its end applies from the next iteration on."""
        moved, works = [], []
        for rank, slowdown in enumerate(slowdowns):
            load = self.plan.load(rank)
            overhead = self.overhead if self.plan.resize[rank] else 0.0
            matmul = 0.7 * slowdown * (load + overhead) * (1 + self.random.uniform(-self.noise, self.noise))
            work = matmul + OTHER * (1 + self.random.uniform(-self.noise, self.noise))
            works.append(work)
            moved.append(self.watches[rank].observe(self.equal_work[rank].normalize(work, matmul, load)))
        self.seconds += max(works)
        exchanged = self.flag and all(watch.ready for watch in self.watches)
        if exchanged:
            gathered = [watch.current() for watch in self.watches]
            self.plan = decide(gathered, Costs(), self.config, self.plan)
            for rank, watch in enumerate(self.watches):
                watch.exchanged()
                watch.relieved(self.plan.resize[rank] + self.plan.migrate[rank])
            self.exchanges += 1
        self.flag = any(moved) and not exchanged
