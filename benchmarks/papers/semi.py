"""SEMI: what resizing and migration cost and save (Wang et al. 2024, Figs. 3 and 5 to 11, Table I).

Accuracy is that of a small ViT on eight ranks in one process (:mod:`.group_training`); the data is a folder of images.
Iteration times of several methods with a straggler are measured on two ranks (:mod:`.straggler_times`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median, stdev

from benchmarks.papers.group_training import RANKS, Run, iteration_ratios, round_robin, steady, train_all
from benchmarks.papers.page import Curves, Figure, Inputs, measured
from colossal_hetero.balance import BalanceConfig, BalancePlan, Costs, RankTimes, predicted_seconds
from colossal_hetero.balance.modes import decide
from colossal_hetero.balance.optimum import divide_stragglers

ASSUMED = Costs(
    resize_fixed=0.03,
    resize_per_share=0.05,
    migrate_fixed_seconds=0.02,
    migrate_seconds_per_share=0.05,
    receive_factor=1.05,
)
EPOCHS = 3
RATIOS = (0.25, 0.5, 0.9)
SLOWDOWNS = (2.0, 4.0, 8.0)
SEEDS = (0, 1, 2)
LARGER = 5
"""Depth of the model that stands for ViT-3B; that for ViT-1B has 3 layers."""
NOTHING = steady((0.0,) * RANKS, EPOCHS)
SMALL = (
    "The paper trains ViT-1B or ViT-3B on all of CIFAR-10 for 150 epochs on eight V100; here it is a ViT of width 128 "
    f"on 4,096 of its images per epoch for {EPOCHS} epochs, so losses are of the beginning of a training. "
    "Accuracies are means of three seeds, and ± is the standard deviation of the differences."
)


class Trainings:
    """Runs with all seeds, and the control without pruning."""

    def __init__(self, runs: Sequence[Run], data_dir: str, depth: int = 3) -> None:
        self._control = Run(NOTHING, depth=depth)
        every = [replace(run, seed=seed) for run in (self._control, *runs) for seed in SEEDS]
        self._trained = train_all(every, data_dir)

    def accuracies(self, run: Run | None = None) -> list[tuple[float, ...]]:
        """Accuracy after each epoch, by seed; without a run, of the control."""
        return [self._trained[replace(run or self._control, seed=seed)] for seed in SEEDS]

    def accuracy(self, run: Run | None = None) -> float:
        """The last accuracy, mean over seeds."""
        return mean(each[-1] for each in self.accuracies(run))

    def loss(self, run: Run) -> str:
        """Points of accuracy below the control with the same seed: mean and standard deviation."""
        pairs = zip(self.accuracies(), self.accuracies(run), strict=True)
        losses = [control[-1] - pruned[-1] for control, pruned in pairs]
        return f"{mean(losses):.1f} ± {stdev(losses):.1f}"

    def curves(self, runs: dict[str, Run]) -> Curves:
        chosen: dict[str, Run | None] = {"nothing pruned": None, **runs}
        lines = {
            name: (range(1, EPOCHS + 1), [mean(each) for each in zip(*self.accuracies(run), strict=True)])
            for name, run in chosen.items()
        }
        return Curves("epoch", "held-out accuracy [%]", lines)


def fig3(inputs: Inputs) -> Figure:
    """Imputations with γ = ½ on all ranks, random columns."""
    runs = {name: Run(steady((0.5,) * RANKS, EPOCHS), imputation=name) for name in ("same", "zero", "average")}
    trained = Trainings(list(runs.values()), inputs.images)
    rows: list[Sequence[object]] = [("nothing pruned", "", trained.accuracy(), "")]
    rows += [
        (name, place, trained.accuracy(run), trained.loss(run)) for place, (name, run) in enumerate(runs.items(), 1)
    ]
    return Figure(
        "SEMI, Fig. 3: imputations, γ = ½ on all ranks",
        ("imputation", "paper: order of accuracy", "accuracy [%]", "loss"),
        rows,
        f"{SMALL} The paper gives the order only.",
        [trained.curves(runs)],
    )


def fig5(inputs: Inputs) -> Figure:
    return _all_ranks(
        "SEMI, Fig. 5: all ranks pruned", 3, inputs.images, {("priority", 0.9): "18 % smaller loss than random"}
    )


def fig6(inputs: Inputs) -> Figure:
    said = {("priority", 0.5): "runtime −23.5 %, loss 14.9 %"}
    return _all_ranks("SEMI, Fig. 6: all ranks pruned, larger model", LARGER, inputs.images, said)


def _all_ranks(title: str, depth: int, data_dir: str, said: dict[tuple[str, float], str]) -> Figure:
    control = Run(NOTHING, depth=depth)
    runs = {
        (rule, ratio): Run(steady((ratio,) * RANKS, EPOCHS), rule, depth=depth)
        for rule in ("random", "priority")
        for ratio in RATIOS
    }
    trained = Trainings(list(runs.values()), data_dir, depth)
    ratios = iteration_ratios([control, *runs.values()])
    rows: list[Sequence[object]] = [("nothing", "0", "", 1.0, trained.accuracy(), "")]
    for (rule, ratio), run in runs.items():
        paper = said.get((rule, ratio), "")
        rows.append((rule, f"{ratio:g}", paper, ratios[run], trained.accuracy(run), trained.loss(run)))
    columns = ("columns", "γ", "paper", "iteration / unpruned", "accuracy [%]", "loss")
    curves = trained.curves({f"{rule}, γ = {ratio:g}": run for (rule, ratio), run in runs.items()})
    why = (
        f"{SMALL} Iterations are those of all eight shards in one process, without communication, in turns; the "
        "paper's runtimes contain what pruning does not shorten. Columns of so small layers take longer "
        "to choose and gather than a half of them saves; of layers that are 2,048 wide, half takes 0.60 of the time "
        "(`benchmarks.tensor_parallel.layer`)."
    )
    return Figure(title, columns, rows, why, [curves])


def fig7(inputs: Inputs) -> Figure:
    return _one_in_turn("SEMI, Fig. 7: one straggler, in turn by epoch, χ = 2", 3, inputs.images)


def fig8(inputs: Inputs) -> Figure:
    return _one_in_turn("SEMI, Fig. 8: one straggler, in turn by epoch, χ = 2, larger model", LARGER, inputs.images)


def _one_in_turn(title: str, depth: int, data_dir: str) -> Figure:
    here = {ratio: Run(round_robin(ratio, EPOCHS), "priority", depth=depth) for ratio in RATIOS}
    everywhere = {ratio: Run(steady((ratio,) * RANKS, EPOCHS), "priority", depth=depth) for ratio in RATIOS}
    trained = Trainings([*here.values(), *everywhere.values()], data_dir, depth)
    rows: list[Sequence[object]] = [("0", "", trained.accuracy(), "", "")]
    for ratio, run in here.items():
        losses = trained.loss(run), trained.loss(everywhere[ratio])
        rows.append((f"{ratio:g}", "less loss than with all ranks pruned", trained.accuracy(run), *losses))
    columns = ("γ of the straggler", "paper", "accuracy [%]", "loss", "loss with all ranks pruned")
    curves = trained.curves({f"γ = {ratio:g}": run for ratio, run in here.items()})
    return Figure(title, columns, rows, SMALL, [curves])


# With a straggler ----------------------------------------------------------------------------------------------------

PAPER_AT_8 = {"zero-pri": "3.5 ×, loss 1.3 %", "zero-pridiff-e": "2.1 ×, loss 0.3 %", "zero-pridiff-r": ""}
RULES = {"zero-pri": "priority", "zero-pridiff-e": "priority-diff", "zero-pridiff-r": "priority-diff"}


def decided(method: str, slowdowns: Sequence[float]) -> BalancePlan:
    """The plan of a method for ranks whose products take so many seconds, and nothing else takes time."""
    times = [RankTimes(slowdown, slowdown) for slowdown in slowdowns]
    config = BalanceConfig(mode="auto") if method == "auto" else BalanceConfig.paper(method)
    return decide(times, ASSUMED, config, BalancePlan.idle(len(times)))


def fig9(inputs: Inputs) -> Figure:
    """The straggler goes round by epoch."""
    runs: dict[tuple[str, float], Run] = {}
    for method, rule in RULES.items():
        for slowdown in SLOWDOWNS:
            ratio = decided(method, [slowdown, *[1.0] * (RANKS - 1)]).resize[0]
            runs[method, slowdown] = Run(round_robin(ratio, EPOCHS), rule)
    return _with_straggler("SEMI, Fig. 9: resizing, the straggler in turn by epoch", runs, inputs.images, PAPER_AT_8)


def fig10(inputs: Inputs) -> Figure:
    """One rank is the straggler all the time."""
    runs: dict[tuple[str, float], Run] = {}
    for method in ("zero-pridiff-r", "mig", "semi", "auto"):
        for slowdown in SLOWDOWNS:
            shares = decided(method, [slowdown, *[1.0] * (RANKS - 1)]).resize
            rule = "random" if not any(shares) else "priority-diff"
            runs[method, slowdown] = Run(steady(shares, EPOCHS), rule)
    said = {"semi": "best of all together", "mig": "far from ideal at large χ", "zero-pridiff-r": "most loss"}
    return _with_straggler("SEMI, Fig. 10: one straggler", runs, inputs.images, said)


def _with_straggler(title: str, runs: dict[tuple[str, float], Run], data_dir: str, said: dict[str, str]) -> Figure:
    trained = Trainings([run for run in runs.values() if _prunes(run)], data_dir)
    seconds = measured_times()
    rows: list[Sequence[object]] = []
    for slowdown in SLOWDOWNS:
        off = seconds[f"off, {slowdown:g}"]
        rows.append((f"{slowdown:g}", "baseline", "", off / seconds["off, 1"], 1.0, "", "0"))
        for (method, at), run in runs.items():
            if at != slowdown:
                continue
            loss = trained.loss(run) if _prunes(run) else "0"
            pruned = max(map(max, run.ratios))
            paper = said.get(method, "") if slowdown == SLOWDOWNS[-1] else ""
            took = seconds[f"{method}, {slowdown:g}"]
            rows.append((f"{slowdown:g}", method, paper, took / seconds["off, 1"], off / took, f"{pruned:.0%}", loss))
    columns = ("χ", "method", "paper", "iteration / no straggler", "speed-up", "pruned (8 ranks)", "loss [points]")
    lines = {
        method: (SLOWDOWNS, [seconds[f"{method}, {slowdown:g}"] / seconds["off, 1"] for slowdown in SLOWDOWNS])
        for method in ("off", *dict.fromkeys(method for method, _ in runs))
    }
    why = (
        f"{SMALL} Times are measured on two ranks of two cores, where the straggler does its products χ times (the "
        "paper sleeps) and has one helper instead of seven, so that migration gains less; the mean of two ranks, to "
        "which ZERO prunes, is far above the fast one. Each way has few iterations after ten of warm-up."
    )
    return Figure(title, columns, rows, why, [Curves("χ", "iteration / no straggler", lines)])


def _prunes(run: Run) -> bool:
    return any(map(any, run.ratios))


def measured_times() -> dict[str, float]:
    """Median seconds of an iteration by "METHOD, χ"."""
    return measured("benchmarks.papers.straggler_times", "times")


def fig11(inputs: Inputs) -> Figure:
    """Half of the ranks are stragglers, of which the λ slowest migrate and the others resize."""
    slowdowns = (8.0, 6.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0)
    times = [RankTimes(slowdown, slowdown) for slowdown in slowdowns]
    plans = {f"λ = {count}": divide_stragglers(times, range(count), range(4), 0.9) for count in range(5)}
    plans |= {"semi": decided("semi", slowdowns), "auto": decided("auto", slowdowns)}
    runs = {name: Run(steady(plan.resize, EPOCHS), "priority-diff") for name, plan in plans.items() if any(plan.resize)}
    trained = Trainings(list(runs.values()), inputs.images)
    seconds = {name: predicted_seconds(times, ASSUMED, plan) for name, plan in plans.items()}
    losses = {name: trained.loss(runs[name]) if name in runs else "0" for name in plans}
    rows = [
        (
            name,
            {"λ = 3": "sweet spot", "semi": "finds λ = 3"}.get(name, ""),
            seconds[name],
            f"{sum(plan.resize) / 8:.0%}",
            f"{sum(plan.migrate) / 8:.0%}",
            losses[name],
        )
        for name, plan in plans.items()
    ]
    by_hand = [name for name in plans if name.startswith("λ")]
    lost = [float(losses[name].split()[0]) for name in by_hand]
    curves = [
        Curves("λ", "iteration / no straggler", {"predicted": (range(5), [seconds[name] for name in by_hand])}),
        Curves("λ", "loss of accuracy [points]", {"trained": (range(5), lost)}),
    ]
    columns = ("division", "paper", "iteration / no straggler", "pruned of all", "migrated of all", "loss [points]")
    why = (
        f"{SMALL} Times are predicted for products only, with assumed costs: two cores cannot be eight ranks. "
        "What is best depends on these costs. Eq. 3 as printed would make receivers late (docs/algorithms.md, 1.6)."
    )
    return Figure("SEMI, Fig. 11: stragglers of χ = 8, 6, 4, 2 among eight ranks", columns, rows, why, curves)


def table1(inputs: Inputs) -> Figure:
    """Epoch times of migrating to other ranks although nobody is slow, by the share γ and the number of senders ν."""
    said = {
        ("broadcast-reduce", 1): (373, 425, 451, 473, 500),
        ("scatter-gather", 1): (373, 478, 627, 796, 963),
        ("broadcast-reduce", 4): (373, 737, 846, 998, 1113),
        ("scatter-gather", 4): (373, 779, 971, 1198, 1436),
    }
    seconds = measured("benchmarks.papers.policies", "policies", "--hidden", "256")
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    rows: list[Sequence[object]] = []
    for senders in (1, 4):
        for method in ("broadcast-reduce", "scatter-gather", "block"):
            here = [seconds[f"{method}, {senders}, {share:g}"] for share in shares]
            paper = said.get((method, senders))
            paper_ratios = [f"{each / paper[0]:.2f}" for each in paper] if paper else ["–"] * 5
            both = (f"{old} / {new / here[0]:.2f}" for old, new in zip(paper_ratios, here, strict=True))
            rows.append((f"{method} ({senders})", *both))
    why = (
        "Each cell: the paper's epoch relative to γ = 0, and ours, of a ViT of width 256. Eight ranks share two cores "
        "here, so an iteration takes as long as the work of all together: migrating costs, but fewer and wider "
        "products save processor time, which hides it at large γ. What methods cost each other is not to be seen here. "
        "`block` is ours."
    )
    return Figure("SEMI, Table I: migration policies", ("policy (ν)", *(f"γ = {s:g}" for s in shares)), rows, why)


def vit_1b(inputs: Inputs) -> Figure:
    """The paper's ViT-1B for a few iterations."""
    found = measured("benchmarks.papers.vit_1b", "vit-1b")
    off, auto = found["off"], found["auto"]
    difference = max(abs(a / b - 1) for a, b in zip(auto["losses"], off["losses"], strict=True))
    before = median(off["seconds"][-3:])
    rows = [
        (
            mode,
            median(each["seconds"][-3:]),
            before / median(each["seconds"][-3:]),
            f"{each['migrated']:.0%}",
            " / ".join(f"{peak / 2**30:.1f}" for peak in each["peak_bytes"]),
            f"{each['losses'][-1]:.6f}",
        )
        for mode, each in found.items()
    ]
    columns = ("mode", "iteration [s]", "speed-up", "migrated", "peak memory of each rank [GiB]", "last loss")
    why = (
        f"{off['parameters'] / 1e9:.2f} billion parameters in single precision, plain SGD, batches of two images, two "
        f"ranks with a core each; rank 1 does its products four times. Of {len(off['losses'])} iterations the last 3 "
        f"count; the losses of both modes agree to {difference:.0e}. The memory contains the whole model, which "
        "each rank has until it is divided. The paper has eight V100 and batches of 64; it gives no such table. "
        "One block of ViT-3B (`-m benchmarks.papers.vit_1b --model vit-3b --depth 1`): 1.46 and 1.32 s, equal losses."
    )
    return Figure("SEMI, ViT-1B: a few iterations of the model itself", columns, rows, why)


FIGURES = {"fig3": fig3, "fig5": fig5, "fig6": fig6, "fig7": fig7, "fig8": fig8, "fig9": fig9, "fig10": fig10}
FIGURES |= {"fig11": fig11, "table1": table1, "vit-1b": vit_1b}
