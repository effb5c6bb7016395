"""AutoHet: pipelines that differ, on mixed GPUs (Wang et al. 2025, Figs. 8 to 10, and planning times).

The clusters are the paper's; layer times are estimated from FLOP, and iterations are predicted. Fig. 10 is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import numpy as np

from benchmarks.papers.page import Figure, Inputs, measured
from benchmarks.planner.autohet_clusters import CLUSTERS, DEGREES, SIZES, cluster, gpt
from benchmarks.planner.autohet_groups import Grouping, MemberKind, find_grouping
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.draft import Draft, DraftBuilder
from colossal_hetero.planner.cost.layout_line import PipelineLayout, PlanLayout, StageLayout
from colossal_hetero.planner.cost.placement import NodeLinks, SlotPool
from colossal_hetero.planner.cost.price import price
from colossal_hetero.planner.cost.tp_groups import slot_kinds
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from colossal_hetero.planner.stages.split_methods import uniform_bounds

BATCH = 128
PREDICTED = "Predicted for GPT-3 6.7B, 45 % of nominal FLOP/s, a global batch of 128; the paper measures tokens/s."


def grouped(topology: Topology, model: ModelProfile, degree: int, size: int) -> tuple[SlotPool, Grouping] | None:
    """The best groups by Eq. 3, with micro-batches of so many samples; None if there are none."""
    kinds = slot_kinds(topology, model, degree, size)
    if not kinds:
        return None
    total, costs = BATCH // size, kinds[0].costs
    found = find_grouping(
        [MemberKind(1 / kind.model_seconds, kind.memory_bytes, len(kind.slots)) for kind in kinds],
        float(costs.state_bytes.sum() + costs.activation_bytes.sum()),
        lambda groups: max(1.0, total / groups),
        max_members=model.blocks,
        max_groups=total,
    )
    pool = SlotPool(degree, size, tuple(kinds), total, NodeLinks(topology, float(costs.output_bytes.max())))
    return None if found is None else (pool, found)


def autohet_iteration(topology: Topology, model: ModelProfile) -> float:
    """Predicted seconds per iteration of AutoHet's Algorithm 1: for each degree the best groups by Eq. 3, then Eq. 4.

    The groups are exact solutions. All micro-batch sizes are tried; the best one counts.
    """
    builder, best = DraftBuilder(topology, "autohet"), np.inf
    for degree in DEGREES:
        for size in SIZES:
            if found := grouped(topology, model, degree, size):
                draft = builder.build(found[0], found[1].groups)
                best = min(best, draft.seconds if isinstance(draft, Draft) else np.inf)
    return best


def fig8(inputs: Inputs) -> Figure:
    """GPUs in other numbers per kind: the fastest plan with equal replicas and stages, AutoHet's, and ours."""
    model = gpt()
    settings = {"H800": ((4, 2, 0), (5, 3, 0), (3, 5, 0), (2, 4, 0)), "H20": ((1, 0, 4), (1, 0, 7), (2, 0, 6))}
    said = {"H800": 1.79, "H20": 1.44}
    rows: list[Sequence[object]] = []
    for other, clusters in settings.items():
        gains = []
        for counts in clusters:
            problem = Problem(topology=cluster(counts), profile=model, global_batch=BATCH)
            uniform = replace(problem, method="uniform", unequal=False, recompute=False, zero_stages=(0,))
            seconds = [search(each).best.iteration_seconds for each in (uniform, problem)]
            printed = autohet_iteration(problem.topology, model)
            gains.append(seconds[0] / seconds[1])
            name = " + ".join(f"{n} {kind}" for n, kind in zip(counts, ("A100", "H800", "H20"), strict=True) if n)
            rows.append((name, seconds[0], printed, seconds[1], seconds[0] / printed, gains[-1], ""))
        rows.append((f"mean with {other}", "", "", "", "", mean(gains), said[other]))
    columns = ("GPUs", "equal [s]", "AutoHet as printed [s]", "ours [s]", "equal / printed", "equal / ours", "paper")
    why = (
        f"{PREDICTED} *Equal* has replicas and stages that are alike, as Megatron-LM, and the best degrees for it; it "
        "may leave GPUs idle. The paper lists its settings in a picture only: those that its text names, and others."
    )
    return Figure("AutoHet, Fig. 8: other numbers of each kind", columns, rows, why)


def fig9(inputs: Inputs) -> Figure:
    """What each part adds on 4 A100 and 4 H800, with tensor parallelism 1 and micro-batches of one."""
    topology, model = cluster((4, 4, 0)), gpt()
    found = grouped(topology, model, 1, 1)
    assert found is not None
    pool, grouping = found
    left = [iter(kind.slots) for kind in pool.kinds]
    groups = [sorted(next(left[k]) for k, n in enumerate(row) for _ in range(n)) for row in grouping.groups]
    drafts = [DraftBuilder(topology, method).build(pool, grouping.groups) for method in ("uniform", "autohet")]
    mapped, balanced = (draft.seconds if isinstance(draft, Draft) else float("nan") for draft in drafts)
    steps = {
        "one pipeline, equal stages, as launched": (1.0, _equal_stages(topology, model, [[(r,) for r in range(8)]])),
        "+ grouping": (1.11, _equal_stages(topology, model, groups)),
        "+ mapping": (1.16, mapped),
        "+ balancing": (1.79, balanced),
    }
    first = steps["one pipeline, equal stages, as launched"][1]
    rows = [(name, said, first / seconds, seconds) for name, (said, seconds) in steps.items()]
    why = (
        f"{PREDICTED} Groups: {', '.join('+'.join(map(str, row)) for row in grouping.groups)} (A100 + H800 each). "
        "Micro-batches are divided by the speed of the groups from `mapping` on, which the paper does not do."
    )
    return Figure("AutoHet, Fig. 9: what each part adds, 4 A100 + 4 H800", ("parts", "paper", "here", "[s]"), rows, why)


def _equal_stages(topology, model, groups: Sequence[Sequence[tuple[int, ...]]]) -> float:
    """Seconds with equally many layers per stage, and micro-batches per pipeline."""
    pipelines = []
    for number, row in enumerate(groups):
        cut = pairwise(uniform_bounds(model.blocks, len(row)))
        stages = [StageLayout(topology.devices[g[0]].kind.name, (each,)) for g, each in zip(row, cut, strict=True)]
        share = BATCH * (number + 1) // len(groups) - BATCH * number // len(groups)
        pipelines.append(PipelineLayout(tuple(stages), share))
    layout = PlanLayout(tuple(pipelines), 1)
    return price(topology, model, layout, tuple(map(tuple, groups))).iteration_seconds


def fig10(inputs: Inputs) -> Figure:
    """Recovery after a change of devices, measured with throttled folders (`benchmarks.checkpoint.recovery`)."""
    found_by_name = measured("benchmarks.checkpoint.recovery", "recovery", "--cloud", "20", "--rounds", "2")
    rows = [
        (name, f"{found['paper']:.2f}", found["alone"] / found["nearest"], found["alone"], found["nearest"])
        for name, found in found_by_name.items()
    ]
    columns = ("scenario", "paper", "here", "each from the shared folder [s]", "from the nearest place [s]")
    why = (
        "GPT-2 with four blocks instead of GPT-3, nodes are folders of this machine, whose bandwidths are in the "
        "paper's proportion. The paper does not say how Varuna's ranks share the cloud; here each reads all that it "
        "needs, at 20 MB/s together."
    )
    return Figure("AutoHet, Fig. 10: recovery, × as fast as from the cloud", columns, rows, why)


def overhead(inputs: Inputs) -> Figure:
    """CPU seconds to plan."""
    said = {16: 1.23, 24: 5.72, 32: 16.96, 64: 159.12}
    rows = []
    for gpus, counts in CLUSTERS.items():
        if gpus > 1024:
            continue
        problem = Problem(topology=cluster(counts), profile=gpt(), global_batch=512)
        start = time.process_time()
        search(problem)
        took = time.process_time() - start
        gap = search(problem, bound_seconds=10).best.gap
        rows.append((f"{gpus:,}", said.get(gpus, "–"), took, "–" if gap is None else f"{gap:.1%}"))
    why = (
        "The paper solves Eq. 3 alone, by SCIP; here it is the whole search, with all degrees, micro-batches, "
        "recomputation and ZeRO 1. Then, in at most 10 s more, it is proved how far the plan can be from the fastest."
    )
    columns = ("GPUs of three kinds", "paper [s]", "here [s of one core]", "proved within")
    return Figure("AutoHet: planning time", columns, rows, why)


FIGURES = {"fig8": fig8, "fig9": fig9, "fig10": fig10, "overhead": overhead}
