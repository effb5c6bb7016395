"""A tensor-parallel group with simulated times, which balances like a real group."""

from collections.abc import Sequence

import numpy as np

from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs
from colossal_hetero.balance.group_speed import GroupSpeed, KindWork
from colossal_hetero.balance.modes import LayerKind, decide

OTHER = 0.3
"""Seconds of work per rank and iteration that cannot be moved. The products of a rank take 0.7 s times its slowdown."""

UNITS = 64
"""Units per rank, in modes that migrate; in mode ``resize`` columns are pruned."""


class SimulatedGroup:
    """Ranks with given slowdowns, noise and a resizing overhead. They run the same state machine as real ranks."""

    def __init__(
        self,
        ranks: int,
        config: BalanceConfig,
        seed: int = 0,
        noise: float = 0.0,
        overhead: float = 0.0,
        received: float = 1.0,
    ) -> None:
        self.config, self.noise, self.overhead, self.received = config, noise, overhead, received
        self.random = np.random.default_rng(seed)
        self.ranks = ranks
        self.kinds = [LayerKind(UNITS if config.is_exact else None, 1, 1.0)]
        self.speed = GroupSpeed([kind.full for kind in self.kinds], ranks, config)
        self.plan = BalancePlan.idle(ranks)
        self.decisions = 0
        self.seconds = 0.0
        """Total time of all iterations."""
        self._posted: list[list[KindWork]] | None = None

    def load(self, rank: int) -> float:
        """What the rank computes; 1 is its full share."""
        return self.plan.units[0][rank] / UNITS if self.plan.units else self.plan.load(rank)

    def iterate(self, slowdowns: Sequence[float], length: float = 1.0) -> None:
        """Run one iteration, with a batch of that relative length."""
        works = []
        for rank, slowdown in enumerate(slowdowns):
            overhead = self.overhead if self.plan.resize[rank] else 0.0
            noise = self.random.uniform(-self.noise, self.noise, 2)
            work = self.load(rank) + overhead + (self.received - 1.0) * max(0.0, self.load(rank) - 1.0)
            matmul = 0.7 * slowdown * work * (1 + float(noise[0])) * length
            load = self.load(rank) * self.kinds[0].full
            works.append([KindWork(load, matmul, OTHER * (1 + float(noise[1])) * length)])
        self.seconds += max(work.seconds for (work,) in works)
        posted, self._posted = self._posted, works
        if posted is None or not self.speed.observe(posted):
            return
        self.decisions += 1
        times, units = self.speed.equal_work(), self.speed.unit_work(self.kinds)
        self.plan = decide(times, Costs(), self.config, self.plan, self.speed.uncertainty, units)
        self.speed.relieved([a + b for a, b in zip(self.plan.resize, self.plan.migrate, strict=True)])

    def run(self, slowdowns: Sequence[float], slow: int = 0) -> list[BalancePlan]:
        """Iterations in which the rank ``slow`` has these slowdowns; returns the plan after each."""
        plans = []
        for slowdown in slowdowns:
            self.iterate([slowdown if rank == slow else 1.0 for rank in range(self.ranks)])
            plans.append(self.plan)
        return plans
