"""Poplar: batches fitted to each GPU under ZeRO (Zhang et al., AAAI 2025, Figs. 3, 5 and 7).

Times of GPUs are those of :mod:`.gpu_tables`; methods are compared under one cost model, nothing is trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import torch
from torch import nn

from benchmarks.papers.gpu_tables import Measured, timed_curves
from benchmarks.papers.page import Curves, Figure, Inputs
from colossal_hetero.planner.batches.allocation import allocate
from colossal_hetero.planner.batches.time_curve import Curve
from colossal_hetero.planner.profile.estimate import Transformer

MODEL, GLOBAL_BATCH = "OPT-350", 1024
SIZES = Transformer(layers=24, hidden=1024, vocabulary=50272, sequence=2048, heads=16)
SAMPLE_TERAFLOP = 3 * (SIZES.layers * SIZES.block_forward_flop + SIZES.head_forward_flop) / 1e12
CLUSTERS = {
    "A": (("A100-80", 4), ("A100-40", 4)),
    "B": (("V100-16", 2), ("T4", 2)),
    "C": (("A800-80", 4), ("V100S-32", 4)),
}
Cluster = Sequence[tuple[str, int]]
METHODS = {"DeepSpeed": "uniform", "Whale": "flops", "Poplar as printed": "poplar", "ours": "exact"}
WHY = (
    "The paper trains Llama 0.5B in half precision on its machines; here it is OPT-350 in single precision (TF32 where "
    "there is TF32) by published times of each card, predicted. A800, V100S and T4 were not timed: they have the times "
    "of A100, V100 and RTX 2080 Ti in proportion to nominal speeds. The paper gives bars without numbers."
)


def teraflops(measured: Measured, cluster: Cluster, stage: int, method: str) -> float | None:
    """Predicted TFLOP/s of the cluster; None if the model does not fit."""
    profile = measured.profile(MODEL, cluster)
    with suppress(ValueError):
        made = allocate(
            timed_curves(profile, stage, GLOBAL_BATCH),
            GLOBAL_BATCH,
            stage,
            method=method,
            accumulation="per_rank" if stage < 2 else "shared",
            communication_seconds=profile.communication(stage),
            flops=profile.flops,
        )
        return SAMPLE_TERAFLOP * made.samples_per_second
    return None


def fig3(inputs: Inputs) -> Figure:
    measured = Measured(inputs.tables)
    rows: list[Sequence[object]] = []
    gains = []
    for name, cluster in CLUSTERS.items():
        for stage in range(4):
            strong, weak = (teraflops(measured, [kind], stage, "exact") for kind in cluster)
            found = {method: teraflops(measured, cluster, stage, rule) for method, rule in METHODS.items()}
            cells = ["–" if each is None else f"{each:.1f}" for each in (weak, strong, *found.values())]
            ratio = "–"
            if found["ours"] and found["DeepSpeed"]:
                gains.append(found["ours"] / found["DeepSpeed"])
                ratio = f"{gains[-1]:.2f}"
            rows.append((f"{name}: {' + '.join(f'{count} {card}' for card, count in cluster)}", stage, *cells, ratio))
    rows.append(("all", "", *[""] * 6, f"paper 1.02 to 3.92, here {min(gains):.2f} to {max(gains):.2f}"))
    columns = ("cluster", "stage", "weaker alone", "stronger alone", *METHODS, "ours / DeepSpeed")
    return Figure("Poplar, Fig. 3: TFLOP/s by ZeRO stage", columns, rows, WHY)


def fig5(inputs: Inputs) -> Figure:
    """Cluster C with other numbers of its GPUs."""
    measured = Measured(inputs.tables)
    strong, weak = (card for card, _ in CLUSTERS["C"])
    rows: list[Sequence[object]] = []
    for a, v in ((0, 4), (4, 0), (4, 1), (4, 2), (4, 3), (4, 4), (3, 4), (2, 4), (1, 4)):
        cluster = [(card, count) for card, count in ((strong, a), (weak, v)) if count]
        cells = []
        for stage in range(4):
            found = [teraflops(measured, cluster, stage, method) for method in ("uniform", "poplar", "exact")]
            cells.append(" / ".join("–" if each is None else f"{each:.1f}" for each in found))
        rows.append((f"{f'A{a}' if a else ''}{f'V{v}' if v else ''}", *cells))
    columns = ("GPUs (A800, V100S)", *(f"stage {stage}" for stage in range(4)))
    why = f"Each cell: DeepSpeed / Poplar as printed / ours, in TFLOP/s. {WHY}"
    return Figure("Poplar, Fig. 5: other numbers of GPUs, cluster C", columns, rows, why)


def fig7(inputs: Inputs) -> Figure:
    """The spline through the micro-batches that profiling times, beside all micro-batches, on this processor."""
    torch.set_num_threads(1)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    sizes = range(1, 33)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(9):
        for size in sizes:
            x = torch.randn(size, 64, 256, requires_grad=True)
            start = time.perf_counter()
            layer(x).sum().backward()
            seconds[size].append(time.perf_counter() - start)
    timed = {size: median(each[2:]) for size, each in seconds.items()}
    curve = Curve.through({size: timed[size] for size in (1, 2, 4, 8, 16, 32)}, 32)
    errors = [abs(float(curve.seconds[size]) / timed[size] - 1) for size in sizes]
    rows = [("median", f"{median(errors):.1%}", "almost zero"), ("largest", f"{max(errors):.1%}", "almost zero")]
    lines = {
        "timed": (sizes, [size / timed[size] for size in sizes]),
        "spline through 1, 2, 4, …": (sizes, [size / float(curve.seconds[size]) for size in sizes]),
    }
    why = (
        "The paper shows an A800; here it is one layer of width 256 on a CPU core, whose times vary by some percent "
        "between sizes (threads and blocks of its matrix library), which no smooth curve has."
    )
    curves = [Curves("samples of a micro-batch", "samples / s", lines)]
    return Figure("Poplar, Fig. 7: spline against all sizes", ("error", "here", "paper"), rows, why, curves)


FIGURES = {"fig3": fig3, "fig5": fig5, "fig7": fig7}
