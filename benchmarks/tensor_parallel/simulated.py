"""How close the balancer comes to the best division on simulated machines; nothing is trained.

Machines have random slowdowns, fixed costs and numbers of heads and neurons. The work of each rank has 3 % noise. The
balancer sees only these noisy times. Reported is the regret: the mean time of the last 100 of 300 iterations relative
to the best division of whole units, which is found from the exact times; and how often the plan changed. Then all ranks
are equally fast, and batches have different lengths: no plan should be made at all.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from benchmarks.common import print_table
from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs
from colossal_hetero.balance.group_speed import GroupSpeed, KindWork
from colossal_hetero.balance.modes import LayerKind, decide

NOISE = 0.03
ITERATIONS = 300
LAST = 100
SLOWDOWNS = (1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 8)
BASE_SECONDS = (0.04, 0.06)
"""Seconds of attention and MLPs on a fast rank."""
LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "equal": lambda draw: 1.0,
    "lognormal, σ 0.5": lambda draw: draw.lognormvariate(0.0, 0.5),
    "uniform, 0.2 to 1.8": lambda draw: draw.uniform(0.2, 1.8),
    "bimodal, 0.3 or 1": lambda draw: draw.choice([0.3, 1.0]),
}


@dataclass(frozen=True)
class Work:
    """The exact time of one rank for one kind of blocks."""

    fixed: float
    """Outside of products."""
    hidden: float
    """Counted with the products, but not in proportion to the units."""
    per_unit: float
    above: float
    """How many times as long a unit of another rank takes."""

    def seconds(self, units: int, full: int) -> float:
        return self.fixed + self.hidden + self.per_unit * (min(units, full) + self.above * max(0, units - full))


class Machine:
    """A group of ranks with two kinds of blocks, attention and MLPs."""

    def __init__(self, draw: random.Random, ranks: int, slowdowns: tuple[float, ...] | None = None) -> None:
        self.draw, self.ranks = draw, ranks
        heads, neurons = draw.choice([2, 4, 8, 12, 16]), draw.choice([32, 48, 64])
        self.kinds = [LayerKind(heads, 1, 0.4), LayerKind(neurons, 1, 0.6)]
        whole_rank_is_slow = draw.random() < 0.5
        if slowdowns is None:
            factors = [draw.uniform(1.0, 1.03) for _ in range(ranks)]
            for rank in draw.sample(range(ranks), draw.choice([1, 1, max(1, ranks // 4)])):
                factors[rank] *= draw.choice(SLOWDOWNS)
            slowdowns = tuple(factors)
        equal = len(set(slowdowns)) == 1
        self.works: list[list[Work]] = []
        for rank, slowdown in enumerate(slowdowns):
            of_rank = []
            for base, kind in zip(BASE_SECONDS, self.kinds, strict=True):
                fixed = draw.uniform(0.05, 0.3) * base * (slowdown if whole_rank_is_slow else 1.0)
                hidden = draw.uniform(0.0, 0.15) * base
                per_unit = (base - hidden) * slowdown / kind.full
                of_rank.append(Work(fixed, hidden * slowdown, per_unit, draw.uniform(1.0, 1.15)))
            self.works.append(self.works[0] if equal and rank else of_rank)

    def seconds(self, plan: BalancePlan) -> float:
        """The exact time of an iteration: each block lasts as long as its slowest rank."""
        return sum(
            max(self.works[rank][kind].seconds(count, int(self.kinds[kind].full)) for rank, count in enumerate(counts))
            for kind, counts in enumerate(self.counts(plan))
        )

    def counts(self, plan: BalancePlan) -> list[list[int]]:
        return [list(of_kind) for of_kind in plan.units] or [[int(kind.full)] * self.ranks for kind in self.kinds]

    def measured(self, plan: BalancePlan, length: float) -> list[list[KindWork]]:
        """What clocks measure in an iteration with a batch of that relative length."""
        rows = []
        counts = self.counts(plan)
        for rank in range(self.ranks):
            row = []
            for kind, of_kind in enumerate(counts):
                work = self.works[rank][kind]
                noisy = max(0.2, self.draw.gauss(1.0, NOISE)) * length
                movable = work.seconds(of_kind[rank], int(self.kinds[kind].full)) - work.fixed
                row.append(KindWork(of_kind[rank], movable * noisy, work.fixed * noisy))
            rows.append(row)
        return rows

    def optimum(self) -> float:
        """The exact time of the best division of whole units, by a search over all times at which a rank can finish."""
        total = 0.0
        for kind in range(len(self.kinds)):
            full = int(self.kinds[kind].full)
            times = [
                [self.works[rank][kind].seconds(count, full) for count in range(1, full * self.ranks + 1)]
                for rank in range(self.ranks)
            ]
            deadlines = sorted({seconds for of_rank in times for seconds in of_rank})
            low, high = 0, len(deadlines) - 1
            while low < high:
                middle = (low + high) // 2
                done = [sum(seconds <= deadlines[middle] for seconds in of_rank) for of_rank in times]
                if min(done) >= 1 and sum(done) >= full * self.ranks:
                    high = middle
                else:
                    low = middle + 1
            total += deadlines[low]
        return total


def balance(machine: Machine, iterations: int, length: Callable[[random.Random], float]) -> list[BalancePlan]:
    """The plans of a run, by iteration."""
    config = BalanceConfig(mode="auto")
    speed = GroupSpeed([kind.full for kind in machine.kinds], machine.ranks, config)
    plans, plan, posted = [], BalancePlan.idle(machine.ranks), None
    for _ in range(iterations):
        plans.append(plan)
        measured = machine.measured(plan, length(machine.draw))
        if posted is not None and speed.observe(posted):
            units = speed.unit_work(machine.kinds)
            plan = decide(speed.equal_work(), Costs(), config, plan, speed.uncertainty, units)
        posted = measured
    return plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=60, help="machines per number of ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    rows = []
    for ranks in (2, 4, 8):
        regrets, changes, against_idle = [], [], []
        for number in range(arguments.machines):
            machine = Machine(random.Random(f"{arguments.seed}, {ranks}, {number}"), ranks)
            plans = balance(machine, ITERATIONS, LENGTHS["equal"])
            seconds = fmean(machine.seconds(plan) for plan in plans[-LAST:])
            regrets.append(100.0 * (seconds / machine.optimum() - 1.0))
            changes.append(sum(before != after for before, after in pairwise(plans)))
            against_idle.append(seconds / machine.seconds(BalancePlan.idle(ranks)))
        rows.append((ranks, fmean(regrets), max(regrets), fmean(changes), max(changes), max(against_idle)))
    print_table(
        f"{arguments.machines} random machines per number of ranks, the last {LAST} of {ITERATIONS} iterations",
        ("ranks", "regret, mean %", "regret, worst %", "changes, mean", "changes, most", "worst × no balancing"),
        rows,
    )

    rows = []
    for ranks in (2, 4, 8):
        mild = []
        for slowdown in (1.05, 1.1, 1.2, 1.3, 1.5):
            regrets, against_idle = [], []
            for number in range(max(1, arguments.machines // 5)):
                factors = (slowdown, *(1.0,) * (ranks - 1))
                machine = Machine(random.Random(f"{arguments.seed}, {ranks}, {number}, mild"), ranks, factors)
                plans = balance(machine, ITERATIONS, LENGTHS["equal"])
                seconds = fmean(machine.seconds(plan) for plan in plans[-LAST:])
                regrets.append(100.0 * (seconds / machine.optimum() - 1.0))
                against_idle.append(seconds / machine.seconds(BalancePlan.idle(ranks)))
            mild.append((ranks, slowdown, fmean(regrets), max(regrets), fmean(against_idle), max(against_idle)))
        rows += mild
    print_table(
        "One mild straggler",
        ("ranks", "slowdown", "regret, mean %", "regret, worst %", "× no balancing, mean", "× no balancing, worst"),
        rows,
    )

    rows = []
    for name, length in LENGTHS.items():
        for ranks in (2, 4, 8):
            planned = 0
            for number in range(max(1, arguments.machines // 3)):
                draw = random.Random(f"{arguments.seed}, {ranks}, {number}, {name}")
                machine = Machine(draw, ranks, (1.0,) * ranks)
                planned += sum(bool(plan.units) for plan in balance(machine, 400, length))
            rows.append((name, ranks, max(1, arguments.machines // 3), planned))
    print_table(
        "Equally fast ranks, 400 iterations per machine",
        ("lengths of batches", "ranks", "machines", "iterations with any plan"),
        rows,
    )


if __name__ == "__main__":
    main()
