"""The planner beside its peers on eleven clusters: plans that peers made.

Rows, for each cluster and model:

- "this planner": its best plan, and its best simple one: without recomputation and ZeRO.
- "chosen by Sailor": of this planner's 30 best plans, the one that Sailor's simulator prices lowest. It shows
  whether the search already holds plans that are best by another model.
- Plans of peers from files (``--plans``): TOML files with ``peer``, ``repository``, ``commit`` and a list ``plans`` of
  ``cluster`` (as printed here), ``model`` and ``layout`` (a line as ``colossal-hetero evaluate`` takes); a list
  ``missing`` may say why there is no plan. Plans whose stages have several tensor-parallel degrees have no price.

Every plan is priced by the formula, by the event simulation, and by Sailor's simulator where its repository is
given (``--sailor``): with our numbers, and with the files as they are. The best is the fastest plan of the cluster that
fits in memory by our count and, where Sailor can count it, by Sailor's. Sailor knows no ZeRO and no recomputation.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import print_markdown, print_table, read_options
from benchmarks.planner.peers.simulator import SailorPrice, SailorSimulator, load_sailor, prepare_copy
from benchmarks.planner.published_clusters import CLUSTERS, DATA, MICRO_BATCHES, Case, published_cases, read_published
from colossal_hetero.planner.cost.evaluate import EvaluatedPlan, evaluate_layout, evaluate_plan
from colossal_hetero.planner.cost.layout_line import layout_of, read_layout, write_layout
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PLANS = Path(__file__).parent / "plans"
GLOBAL_BATCH = 256
KEPT = 30
"""Plans that Sailor's simulator chooses from."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "this planner": {},
    "this planner, simple": {"recompute": False, "zero_stages": (0,)},
}
CHOSEN = "chosen by Sailor"
PRICES = ("formula", "event simulation", "Sailor's simulator", "Sailor's simulator, its own files")


@dataclass(frozen=True)
class PeerPlan:
    """A plan of a peer, from a file."""

    peer: str
    cluster: str
    model: str
    layout: str


@dataclass(frozen=True)
class PricedPlan:
    """A plan and what it takes, by each way to price it."""

    evaluated: EvaluatedPlan
    seconds: tuple[float | None, ...]
    """As ``PRICES``; None: no price."""
    fits: bool
    """By our count and, where Sailor can count it, by Sailor's."""
    sailor: SailorPrice | str


def load_peer_plans(folder: Path) -> list[PeerPlan]:
    """The plans in all TOML files of a folder.

    Raises:
        ValueError: A file lacks a field.
    """
    plans = []
    for path in sorted(folder.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in ("peer", "repository", "commit") if name not in content]
        missing += [] if "plans" in content or "missing" in content else ["plans"]
        if missing:
            raise ValueError(f"{path} lacks {', '.join(missing)}")
        source = f"{content['peer']} ({content['repository']}@{content['commit'][:7]})"
        for number, each in enumerate(content.get("plans", ())):
            fields = [each.get(name) for name in ("cluster", "model", "layout")]
            if None in fields:
                raise ValueError(f"{path}, plans[{number}]: needs cluster, model and layout")
            plans.append(PeerPlan(source, *fields))
    return plans


def has_one_degree(line: str) -> bool:
    """True if all stages of a layout line have one tensor-parallel degree: their own, else that of the line, else 1."""
    whole = re.search(r"\btp (\d+)", re.sub(r"\[[^]]*\]", "", line))
    stages = [stage for pipeline in re.findall(r"\[([^]]*)\]", line) for stage in pipeline.split("|")]
    return len({(own or whole or ["", "1"])[1] for own in (re.search(r"\btp (\d+)", stage) for stage in stages)}) == 1


class Pricer:
    """Prices plans of one cluster and model."""

    def __init__(self, case: Case, ours: SailorSimulator | str, own_files: SailorSimulator | str) -> None:
        self.case, self.ours, self._own_files = case, ours, own_files

    def priced(self, evaluated: EvaluatedPlan) -> PricedPlan:
        plan = evaluated.plan
        told = [
            each.price(self.case.topology, plan) if isinstance(each, SailorSimulator) else each
            for each in (self.ours, self._own_files)
        ]
        seconds = [None if isinstance(each, str) else each.seconds for each in told]
        fits = evaluated.fits
        if not isinstance(told[0], str) and not plan.zero_stage:
            fits = fits and told[0].fits
        return PricedPlan(evaluated, (plan.iteration_seconds, evaluated.simulated_seconds, *seconds), fits, told[0])

    def searched(self, keep: int = 1, **options: Any) -> list[PricedPlan]:
        """The planner's best plans."""
        case = self.case
        sizes: dict[str, Any] = dict(global_batch=GLOBAL_BATCH, micro_batches=MICRO_BATCHES)
        problem = Problem(topology=case.topology, profile=case.profile, **sizes, **options)
        found = search(problem, keep=keep).plans
        return [self.priced(evaluate_plan(case.topology, case.profile, each.plan)) for each in found]

    def of_layout(self, line: str) -> PricedPlan:
        """The plan of a peer."""
        if not has_one_degree(line):
            raise ValueError("not priced: several tensor-parallel degrees")
        topology, profile = self.case.topology, self.case.profile
        return self.priced(evaluate_layout(topology, profile, read_layout(line), global_batch=GLOBAL_BATCH))

    def by_sailor(self) -> PricedPlan:
        """Of the planner's best plans, the one that Sailor's simulator prices lowest."""
        plans = [each for each in self.searched(KEPT) if each.fits and each.seconds[2] is not None]
        if not plans:
            raise ValueError(f"Sailor's simulator can price none of {KEPT} plans")
        return min(plans, key=lambda each: each.seconds[2] or 0.0)


def candidates(pricer: Pricer, peers: Sequence[PeerPlan]) -> Iterator[tuple[str, PricedPlan | str]]:
    """Plans by who made them, or why there is none."""
    makers: dict[str, Callable[[], PricedPlan]] = {
        name: lambda options=options: pricer.searched(**options)[0]  # type: ignore[misc]
        for name, options in OWN.items()
    }
    if isinstance(pricer.ours, SailorSimulator):
        makers[CHOSEN] = pricer.by_sailor
    for each in peers:
        makers[each.peer] = partial(pricer.of_layout, each.layout)
    for name, make in makers.items():
        try:
            yield name, make()
        except ValueError as error:
            yield name, str(error)


@dataclass
class Wins:
    """In how many rows a plan is the best or within 1 % of it."""

    rows: int = 0
    wins: int = 0
    behind: float = 1.0
    """The largest ratio to the best."""


def count_wins(cases: Sequence[Mapping[str, PricedPlan | str]], name: str, price: int, peers: Sequence[str]) -> Wins:
    """How often a plan is best by the price at this place in ``PRICES``, among itself and those of the ``peers``."""
    found = Wins()
    for plans in cases:
        seconds = {
            who: each.seconds[price]
            for who, each in plans.items()
            if isinstance(each, PricedPlan) and each.fits and each.seconds[price] is not None
        }
        rivals = [value for who, value in seconds.items() if who != name and who in peers and value is not None]
        own = seconds.get(name)
        if own is None or not rivals:
            continue
        ratio = own / min(*rivals, own)
        found.rows += 1
        found.wins += ratio <= 1.01
        found.behind = max(found.behind, ratio)
    return found


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_case(case: Case, plans: Mapping[str, PricedPlan | str]) -> None:
    rows = []
    for who, each in plans.items():
        if isinstance(each, str):
            rows.append([who, *["-"] * len(PRICES), each.splitlines()[0][:80]])
            continue
        note = [] if each.evaluated.fits else ["too large"]
        if not isinstance(each.sailor, str) and not each.sailor.fits:
            lacks = ", which lacks ZeRO" if each.evaluated.plan.zero_stage else ""
            note.append(f"too large by Sailor's count{lacks}")
        line = write_layout(layout_of(each.evaluated.plan))
        rows.append([who, *map(cell, each.seconds), "; ".join([*note, line])])
    names = ["plan", *(f"{name} [s]" for name in PRICES), "note"]
    print_table(f"{case.cluster}, {case.profile.name}", names, rows)


def print_overview(cases: Sequence[tuple[Case, Mapping[str, PricedPlan | str]]], names: Sequence[str]) -> None:
    """One row per cluster and model, with formula / event simulation / Sailor's simulator."""
    rows = []
    for case, plans in cases:
        cells = []
        for name in names:
            each = plans.get(name, "")
            if isinstance(each, str):
                cells.append("none")
                continue
            cells.append(" / ".join(map(cell, each.seconds[:3])) + ("" if each.fits else " *"))
        rows.append([case.cluster, case.profile.name, *cells])
    title = "Seconds of an iteration: formula / event simulation / Sailor's simulator; *: too large"
    print_markdown(title, ["cluster", "model", *names], rows)


def print_wins(cases: Sequence[Mapping[str, PricedPlan | str]], peers: Sequence[str]) -> None:
    rows = []
    for name in dict.fromkeys(name for plans in cases for name in plans):
        row = [name]
        for price in range(len(PRICES)):
            found = count_wins(cases, name, price, peers)
            row.append(f"{found.wins} of {found.rows} (× {found.behind:.3f})" if found.rows else "-")
        rows.append(row)
    title = "Best or within 1 %, among itself and peers' plans (largest ratio to the best)"
    print_markdown(title, ["plan", *PRICES], rows)


def main() -> None:
    arguments = read_options(__doc__, data=DATA, plans=PLANS, sailor=Path, clusters=len(CLUSTERS))
    peers = load_peer_plans(arguments.plans)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        copy = None
        if arguments.sailor:
            published = read_published(arguments.data)
            copy = prepare_copy(arguments.sailor, Path(folder), published.profiles, published.channels, MICRO_BATCHES)
        for case in published_cases(arguments.data, CLUSTERS[: arguments.clusters]):
            pricer = Pricer(case, load_sailor(copy, case.profile), load_sailor(arguments.sailor, case.profile))
            own = [each for each in peers if (each.cluster, each.model) == (case.cluster, case.profile.name)]
            plans = dict(candidates(pricer, own))
            print_case(case, plans)
            sys.stdout.flush()
            found.append((case, plans))
            if isinstance(pricer.ours, str):
                print(f"Sailor's columns are empty: {pricer.ours}.")
    who = list(dict.fromkeys(each.peer for each in peers))
    print_overview(found, [*OWN, CHOSEN, *who])
    print_wins([plans for _, plans in found], who)


if __name__ == "__main__":
    main()
