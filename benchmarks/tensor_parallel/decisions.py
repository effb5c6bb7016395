"""The time of a decision, and the quality of plans in the setting of the paper's Fig. 11; nothing is trained.

Four of eight ranks are stragglers, 8, 6, 4 and 2 times slower. By hand, each subset of the four migrates while the
other stragglers resize; the paper tries only the λ slowest. These divisions and the modes `semi` and `auto` are
compared by predicted iteration time.
"""

from __future__ import annotations

import argparse
import time
from itertools import combinations
from statistics import median

import numpy as np

from benchmarks.common import print_table
from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs, RankTimes, predicted_seconds
from colossal_hetero.balance.modes import decide
from colossal_hetero.balance.optimum import divide_stragglers

SLOWDOWNS = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
STRAGGLERS = range(4)
ASSUMED = Costs(
    resize_fixed=0.03,
    resize_per_share=0.05,
    migrate_fixed_seconds=0.02,
    migrate_seconds_per_share=0.05,
    receive_factor=1.05,
)
MODES = ("off", "resize", "migrate", "semi", "auto")


def decision_seconds(mode: str, ranks: int, repeats: int) -> float:
    """Median seconds of a decision. Each decision gets new random times, in which a third of the ranks is slow."""
    random = np.random.default_rng(ranks)
    config = BalanceConfig(mode=mode, max_resize=0.5)
    seconds = []
    for _ in range(repeats):
        slowdowns = np.where(
            random.random(ranks) < 1 / 3, random.uniform(1.5, 8.0, ranks), random.uniform(1, 1.05, ranks)
        )
        times = [RankTimes(0.3 + 0.7 * slowdown, 0.7 * slowdown) for slowdown in slowdowns.tolist()]
        start = time.perf_counter()
        decide(times, ASSUMED, config, BalancePlan.idle(ranks))
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def compare_divisions(costs: Costs, matmul_seconds: float, max_resize: float) -> None:
    times = [RankTimes(slowdown * matmul_seconds, slowdown * matmul_seconds) for slowdown in SLOWDOWNS]
    by_hand = {
        migrating: divide_stragglers(times, migrating, STRAGGLERS, max_resize)
        for count in range(len(STRAGGLERS) + 1)
        for migrating in combinations(STRAGGLERS, count)
    }
    best = min(by_hand, key=lambda migrating: predicted_seconds(times, costs, by_hand[migrating]))
    names = ", ".join(f"χ={SLOWDOWNS[rank]:.0f}" for rank in best) or "none"
    plans = {f"by hand: λ={count} slowest migrate": by_hand[tuple(range(count))] for count in range(5)}
    plans[f"by hand: best of 16, migrating: {names}"] = by_hand[best]
    for mode in ("semi", "auto"):
        config = BalanceConfig(mode=mode, max_resize=max_resize)
        plans[mode] = decide(times, costs, config, BalancePlan.idle(len(times)))
    least = predicted_seconds(times, costs, by_hand[best])
    rows = []
    for name, plan in plans.items():
        seconds = predicted_seconds(times, costs, plan)
        rows.append((name, seconds / matmul_seconds, seconds / least, sum(plan.resize) / 8, sum(plan.migrate) / 8))
    print_table(
        f"\nFig. 11, at most {max_resize:.0%} of a rank's work pruned: predicted iteration time",
        ("division", "× homogeneous", "× best by hand", "pruned / all work", "migrated / all work"),
        rows,
        [f"{mode}: {plans[mode].note}" for mode in ("semi", "auto")],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--matmul-seconds", type=float, default=1.0, help="time of the products on a rank that is not slow (default: 1)"
    )
    parser.add_argument("--max-resize", type=float, nargs="+", default=[0.9, 0.5, 0.0])
    arguments = parser.parse_args()

    rows = [(mode, 1e3 * decision_seconds(mode, 8, 100)) for mode in MODES]
    print_table("Milliseconds per decision, median of 100", ("mode", "8 ranks"), rows)
    for max_resize in arguments.max_resize:
        compare_divisions(ASSUMED, arguments.matmul_seconds, max_resize)
    print(f"Assumed costs: {ASSUMED}")


if __name__ == "__main__":
    main()
