"""The planner beside its peers on eleven clusters: plans from files, and the spaces that peers search.

Three kinds of rows, for each cluster and model:

- "this planner": the default plan and the best plan of the whole space.
- "space of X, our search": the best plan that *this* planner finds if it may only choose what X may choose, as
  published. It is never X's own result, which can be another one, because X searches and predicts otherwise.
- Plans of peers from files (``--plans``): TOML files with ``peer``, ``repository``, ``commit`` and a list ``plans`` of
  ``cluster`` (as printed here), ``model`` and ``layout`` (a line as ``colossal-hetero evaluate`` takes). Peers are not
  run here: they need their own environments, and their plans are written down as lines.

Every plan is priced by the closed form, by the event simulation, and by Sailor's simulator where its repository is
given (``--sailor``); "left" counts memory independently, as ``memory_of_plans.py`` does, for plans of one form in ZeRO
stage 0. The best is the fastest plan of the cluster that fits in memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import print_table
from benchmarks.planner.memory_of_plans import excess_bytes, layer_bytes
from benchmarks.planner.published_clusters import CLUSTERS, DATA, MICRO_BATCHES, published_cases
from benchmarks.planner.sailor_simulator import SailorSimulator, load_sailor
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.evaluation.evaluate import EvaluatedPlan, evaluate_layout, evaluate_plan
from colossal_hetero.planner.layout_line.read_layout import read_layout
from colossal_hetero.planner.plans.runnable import why_unlike_stages
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.search.make_plans import make_plans
from colossal_hetero.planner.slots.search_space import WHOLE, SearchSpace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SPACES: Mapping[str, Mapping[str, Any]] = {
    "this planner, default": {},
    "this planner, whole space": {"space": WHOLE},
    "space of Megatron, our search": {"method": "uniform", "unequal": False},
    "space of AMP, our search": {"unequal": False},
    "space of Metis, our search": {
        "unequal": False,
        "space": SearchSpace(mixed_degrees=True, widths=(1, 2, 4)),
    },
    "space of FlashFlex, our search": {"space": SearchSpace(mixed_degrees=True)},
}
"""What may be chosen. Megatron: equal pipelines of equal stages, one degree. AMP: one degree, equal pipelines of any
stages. Metis: also a degree and a number of data-parallel groups for each stage. FlashFlex: pipelines that differ, with
a degree for each stage."""


@dataclass(frozen=True)
class PeerPlan:
    """A plan of a peer, from a file."""

    peer: str
    cluster: str
    model: str
    layout: str


def load_peer_plans(folder: Path) -> list[PeerPlan]:
    """The plans in all TOML files of a folder.

    Raises:
        ValueError: A file lacks a field.
    """
    plans = []
    for path in sorted(folder.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in ("peer", "repository", "commit", "plans") if name not in content]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        source = f"{content['peer']} ({content['repository']}@{content['commit'][:7]})"
        for number, each in enumerate(content["plans"]):
            fields = [each.get(name) for name in ("cluster", "model", "layout")]
            if None in fields:
                raise ValueError(f"{path}, plans[{number}]: needs cluster, model and layout")
            plans.append(PeerPlan(source, *fields))
    return plans


def candidates(
    topology: Topology, profile: ModelProfile, global_batch: int, peers: list[PeerPlan]
) -> dict[str, EvaluatedPlan | str]:
    """Plans by who made them, or why there is none."""

    def attempt(make: Callable[[], EvaluatedPlan]) -> EvaluatedPlan | str:
        try:
            return make()
        except ValueError as error:
            return str(error)

    def searched(options: Mapping[str, Any]) -> EvaluatedPlan:
        sizes = MICRO_BATCHES
        found = make_plans(topology, profile, global_batch=global_batch, micro_batches=sizes, keep=1, **options)
        return evaluate_plan(topology, profile, found[0].plan)

    rows = {name: attempt(lambda options=options: searched(options)) for name, options in SPACES.items()}  # type: ignore[misc]
    for each in peers:
        rows[each.peer] = attempt(
            lambda each=each: evaluate_layout(topology, profile, read_layout(each.layout), global_batch=global_batch)  # type: ignore[misc]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the tables (default: %(default)s)")
    parser.add_argument("--plans", type=Path, help="folder with plans of peers (TOML)")
    parser.add_argument("--sailor", type=Path, help="checkout of Sailor's repository, for its simulator")
    parser.add_argument("--global-batch", type=int, default=256, help="sequences per iteration (default: %(default)s)")
    parser.add_argument("--clusters", type=int, default=len(CLUSTERS), help="the first so many clusters only")
    arguments = parser.parse_args()
    cases = published_cases(arguments.data, CLUSTERS[: arguments.clusters])
    layers = layer_bytes(arguments.data / "layer_memory.csv")
    peers = load_peer_plans(arguments.plans) if arguments.plans else []
    wins, total = dict.fromkeys(SPACES, 0), 0
    for name, topology, profile in cases:
        sailor = load_sailor(arguments.sailor, profile)
        own = [each for each in peers if (each.cluster, each.model) == (name, profile.name)]
        plans = candidates(topology, profile, arguments.global_batch, own)
        fitting = [
            each.plan.iteration_seconds for each in plans.values() if isinstance(each, EvaluatedPlan) and each.fits
        ]
        best, total = min(fitting, default=float("nan")), total + 1
        rows = []
        for who, each in plans.items():
            if isinstance(each, str):
                rows.append([who, "-", "-", "-", "-", "-", each[:60]])
                continue
            ratio = each.plan.iteration_seconds / best
            if who in wins and ratio <= 1.01:
                wins[who] += 1
            told = sailor.seconds(topology, each.plan) if isinstance(sailor, SailorSimulator) else sailor
            by_sailor = "-" if isinstance(told, str) else f"{told[0]:.3f}{'' if told[1] else ' too large'}"
            counted = why_unlike_stages(each.plan) is None and not each.plan.zero_stage
            left = f"{-excess_bytes(each.plan, profile, layers) / 1e9:+.1f}" if counted else "-"
            seconds = f"{each.plan.iteration_seconds:.3f}"
            rows.append(
                [
                    who,
                    seconds,
                    f"{ratio:.3f}",
                    f"{each.simulated_seconds:.3f}",
                    by_sailor,
                    left,
                    "" if each.fits else "too large",
                ]
            )
        names = ["plan", "closed form [s]", "× best", "simulated [s]", "Sailor [s]", "left [GB]", "note"]
        print_table(f"{name}, {profile.name}", names, rows)
        if isinstance(sailor, str):
            print(f"Sailor's column is empty: {sailor}.")
    print(f"Within 1 % of the best, of {total}: {', '.join(f'{name} {number}' for name, number in wins.items())}.")


if __name__ == "__main__":
    main()
