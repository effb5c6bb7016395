"""What a user sees: what is trained, how far it is, and what balancing did. Rank 0 only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from data import DataInfo
from options import Layout, Options
from results import Measurements
from rich.box import SIMPLE_HEAD
from rich.table import Table
from terminal import Terminal

from colossal_hetero.balance.report.summary import BalanceReport

__all__ = ["Display", "Shares"]


class Shares(NamedTuple):
    """What balancing does to a rank, as shares of its work."""

    resized: float
    migrated: float
    received: float

    def __str__(self) -> str:
        """For example ``resized 40%, migrated 37%``; empty where nothing is done."""
        return ", ".join(f"{name} {share:.0%}" for name, share in self._asdict().items() if share > 0)


class Display(Terminal):
    """The terminal; silent unless ``visible``."""

    def __init__(self, options: Options, visible: bool) -> None:
        self._options = options
        super().__init__(
            visible,
            "epoch {task.fields[epoch]}",
            "{task.fields[rate]:.1f} it/s · loss {task.fields[loss]:.3f}{task.fields[plan]}",
        )

    def start(self, layout: Layout, data: DataInfo, parameters: int, device: Any, epochs: int, iterations: int) -> None:
        """Say what is going to happen."""
        options = self._options
        name = options.model or (
            f"ViT, {options.shape('hidden')} wide, {options.shape('depth')} deep, {options.shape('heads')} heads, "
            f"patch {options.shape('patch')}"
        )
        plugin = "Colossal-AI's plugin" if options.plugin == "colossalai" else f"balance {options.balance}"
        straggler = f", straggler {options.straggler}" if options.straggler else ""
        self._console.print(f"{name}: {parameters / 1e6:.1f} M parameters, {options.precision} on {device}")
        self._console.print(
            f"{options.data}: {data.train_images} images to train on, {data.test_images} held out, "
            f"{data.classes} classes"
        )
        self._console.print(
            f"{layout.world_size} ranks (tensor {layout.tp} × pipeline {layout.pp} × data {layout.dp}), "
            f"{plugin}{straggler}; {iterations} iterations"
        )
        self._epochs, self._classes = epochs, data.classes
        self._task = self._progress.add_task("", total=iterations, epoch=f"1/{epochs}", rate=0.0, loss=0.0, plan="")
        self._last = time.perf_counter()

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def iteration(self, loss: float | None, shares: Sequence[Shares]) -> None:
        """An iteration is over; ``loss`` is the one before's."""
        now = time.perf_counter()
        shown = "".join(f" · rank {rank} {share}" for rank, share in enumerate(shares) if str(share))
        fields: dict[str, Any] = {"rate": 1.0 / max(now - self._last, 1e-9), "plan": shown}
        if loss is not None:
            fields["loss"] = loss
        self._progress.update(self._task, advance=1, **fields)
        self._last = now

    def epoch(self, epoch: int, measurements: Measurements) -> None:
        """An epoch is over."""
        here = [number for number, its in enumerate(measurements.epochs) if its == epoch]
        seconds = sum(measurements.seconds[number] for number in here) / len(here)
        loss = sum(measurements.loss[number] for number in here) / len(here)
        shares = ""
        if (record := measurements.records.get(here[-1])) is not None:
            for rank in record.ranks:
                if done := str(Shares(rank.resized, rank.migrated, rank.received)):
                    shares += f"  rank {rank.rank} {done}"
        self._console.print(
            f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}  loss {loss:.3f}  "
            f"accuracy {measurements.accuracy[-1]:6.1%}  {seconds * 1e3:.0f} ms per iteration{shares}"
        )
        self._progress.update(self._task, epoch=f"{min(epoch + 2, self._epochs)}/{self._epochs}")
        self._last = time.perf_counter()

    def report(self, measurements: Measurements, summary: dict[str, Any]) -> None:
        """Say what each rank did, what an iteration took, and what would have been."""
        took = summary["iteration_seconds"]["median"]
        found = measurements.report()
        if found is None:
            self._console.print(f"An iteration took {took * 1e3:.0f} ms.")
        else:
            self._console.print(_rank_table(found, measurements))
            waited = found.waiting_seconds * 1e3
            self._console.print(
                f"An iteration took {took * 1e3:.0f} ms, of which ranks waited {waited:.0f} ms for slower ones (mean)."
            )
            self._console.print(_what_if(found, balanced=self._options.balance != "off"))
            if found.notes and not any(rank.migrated for rank in found.ranks):
                self._console.print(f"Nothing was migrated: {found.notes[-1].rstrip('.')}.")
        if measurements.accuracy:
            chance = 1.0 / self._classes
            self._console.print(
                f"Accuracy on held-out images: {measurements.accuracy[-1]:.1%} (chance is {chance:.0%})."
            )
        for what in ("summary", "trace", "plot", "chrome_trace", "tensorboard", "checkpoint"):
            if (path := getattr(self._options, what)) is not None:
                self._console.print(f"{what.capitalize().replace('_', ' ')}: {path}", soft_wrap=True)


def _rank_table(found: BalanceReport, measurements: Measurements) -> Table:
    """A row per rank; columns for what nobody did are left out."""
    # Ten columns in the 80 characters of a terminal that does not tell its width.
    compact: dict[str, Any] = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}
    table = Table("rank", title="An iteration, by rank (medians, times in ms)", title_justify="left", **compact)
    ordered = measurements.stragglers is not None and measurements.stragglers.schedule == "constant"
    done = [name for name in Shares._fields if any(getattr(rank, name) for rank in found.ranks)]
    headings = (*(["slowed"] if ordered else []), "work", "matmul", "wait", *done, "score", "own")
    for heading in headings:
        table.add_column(heading, justify="right")
    for rank in found.ranks:
        slowdown = measurements.slowdown(rank.rank, 0)
        table.add_row(
            str(rank.rank),
            *([f"× {slowdown:g}" if slowdown > 1 else ""] if ordered else []),
            *(f"{value * 1e3:.0f}" for value in (rank.work_seconds, rank.matmul_seconds, rank.wait_seconds)),
            *(f"{getattr(rank, name):.0%}" for name in done),
            *(f"{score:.2f}" for score in (rank.relative_score, rank.own_score)),
        )
    return table


def _what_if(found: BalanceReport, balanced: bool) -> str:
    """What an iteration would have taken otherwise."""
    text = ""
    if balanced:
        saved = found.saved_seconds * 1e3
        text = (
            f"Unbalanced it would have taken {found.unbalanced_seconds * 1e3:.0f} ms "
            f"({found.unbalanced_seconds / found.balanced_seconds:.1f} times as long: balancing "
            f"{'saved' if saved >= 0 else 'cost'} {abs(saved):.0f} ms). "
        )
    return text + (
        f"With all ranks as fast as the fastest it would have taken {found.homogeneous_seconds * 1e3:.0f} ms; "
        f"with nothing pruned and the work spread ideally, {found.bound_seconds * 1e3:.0f} ms."
    )
