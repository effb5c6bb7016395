"""What an example with tensor parallelism shows and writes: progress, epochs, the table of ranks, and all files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch.distributed as dist
from torch import Tensor

from colossal_hetero.accelerator import get_accelerator
from colossal_hetero.balance.report import comparison_text, moved_shares, rank_table

from .measurements import Measurements, summarize
from .tensor_parallel import Layout, TensorParallelOptions
from .terminal import Terminal, peak_memory_by_rank, write_json


class BalancingReport(Terminal):
    """Follows a run with ``HeteroHybridParallelPlugin`` or Colossal-AI's plugin; prints and writes on rank 0.

    Args:
        options: the command line.
        layout: how the ranks are divided.
        plugin: to ask its balancer, if it has one.
        quiet: do not print on rank 0 either.
        accuracy_of: what the held-out data are; ``baseline``: what to compare the accuracy with, in words.
    """

    def __init__(
        self,
        options: TensorParallelOptions,
        layout: Layout,
        plugin: Any,
        *,
        quiet: bool = False,
        accuracy_of: str = "images",
        baseline: str = "",
    ) -> None:
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        super().__init__(
            self._first and not quiet,
            "epoch {task.fields[epoch]}",
            "{task.fields[rate]:.1f} it/s · loss {task.fields[loss]:.3f}{task.fields[plan]}",
        )
        self._options, self._layout, self._plugin = options, layout, plugin
        self._accuracy_of, self._baseline = accuracy_of, baseline
        self.measurements = Measurements(options, layout, options.stragglers(layout.world_size))

    def start(self, model: str, data: str, epochs: int, iterations: int) -> None:
        """Print what is going to happen."""
        options, layout = self._options, self._layout
        device = get_accelerator().get_current_device()
        balancing = options.balancing.removeprefix("--") or "balance off"
        plugin = "Colossal-AI's plugin" if options.plugin == "colossalai" else balancing
        straggler = f", straggler {options.straggler}" if options.straggler else ""
        self._console.print(f"{model}, {options.precision} on {device}")
        self._console.print(data)
        self._console.print(
            f"{layout.world_size} ranks (tensor {layout.tp} × pipeline {layout.pp} × data {layout.dp}), "
            f"{plugin}{straggler}; {iterations} iterations"
        )
        self._epochs, self._iterations = epochs, iterations
        self._task = self._progress.add_task("", total=iterations, epoch=f"1/{epochs}", rate=0.0, loss=0.0, plan="")

    def __enter__(self) -> BalancingReport:
        get_accelerator().reset_peak_memory_stats()
        self._progress.start()
        return self

    def begin_epoch(self) -> None:
        """The time from here to the next :meth:`iteration` belongs to the epoch's first iteration."""
        self._last = time.perf_counter()

    def iteration(self, epoch: int, losses: Sequence[Tensor]) -> None:
        """An iteration is over; ``losses`` are this epoch's so far."""
        fields: dict[str, Any] = {"rate": 1.0 / max(time.perf_counter() - self._last, 1e-9), "plan": self._plan()}
        if len(losses) > 1:
            # The loss of the iteration before is ready; reading the latest would make the host wait for a GPU.
            fields["loss"] = losses[-2].item()
        self._progress.update(self._task, advance=1, **fields)
        now = time.perf_counter()
        self.measurements.iteration(epoch, now - self._last)
        self.is_at(len(self.measurements.seconds), self._iterations)
        self._last = now

    def _plan(self) -> str:
        balancer = getattr(self._plugin, "balancer", None)
        if balancer is None or not balancer.active:
            return ""
        plan = balancer.plan
        texts = map(moved_shares, plan.resize, plan.migrate, plan.receive)
        return "".join(f" · rank {rank} {text}" for rank, text in enumerate(texts) if text)

    def epoch(self, epoch: int, losses: Sequence[float], accuracy: float) -> None:
        """An epoch is over. Collective over all ranks.

        Args:
            epoch: its number.
            losses: of its iterations, the mean over all replicas.
            accuracy: on held-out data, in [0, 1].
        """
        balancer = getattr(self._plugin, "balancer", None)
        measured = self.measurements
        measured.epoch(list(losses), accuracy, None if balancer is None else balancer.collect())
        self.print_epoch(epoch)

    def print_epoch(self, epoch: int) -> None:
        """Print the line of an epoch."""
        measured = self.measurements
        numbers = [number for number, its in enumerate(measured.epochs) if its == epoch]
        seconds = median(measured.seconds[number] for number in numbers)
        loss = fmean(measured.loss[number] for number in numbers)
        record = measured.records.get(numbers[-1])
        moved = [
            (rank.rank, moved_shares(rank.resized, rank.migrated, rank.received, rank.resharded))
            for rank in (record.ranks if record else ())
        ]
        self.line(
            f"epoch {epoch + 1:>{len(str(self._epochs))}}/{self._epochs}  loss {loss:.3f}  "
            f"accuracy {measured.accuracy[-1]:6.1%}  {seconds * 1e3:.0f} ms per iteration"
            + "".join(f"  rank {rank} {text}" for rank, text in moved if text)
        )
        self._progress.update(self._task, epoch=f"{min(epoch + 2, self._epochs)}/{self._epochs}")

    def finish(self) -> dict[str, Any] | None:
        """Write the files and print the result; the summary on rank 0, None elsewhere. Collective over all ranks."""
        peaks = peak_memory_by_rank()
        if not self._first:
            return None
        summary = summarize(self.measurements, peaks)
        if self._options.summary is not None:
            write_json(summary, self._options.summary)
        self.print_result(summary)
        return summary

    def print_result(self, summary: dict[str, Any]) -> None:
        """Print what each rank did, what an iteration took, and what it would have taken."""
        took = summary["iteration_seconds"]["median"]
        found = self.measurements.report()
        if found is None:
            self._console.print(f"An iteration took {took * 1e3:.0f} ms.")
        else:
            stragglers = self.measurements.stragglers
            constant = stragglers is not None and stragglers.schedule == "constant"
            self._console.print(rank_table(found, stragglers.slowdowns if stragglers and constant else None))
            waited = found.waiting_seconds
            self._console.print(
                f"An iteration took {took * 1e3:.0f} ms (median), of which ranks waited {waited * 1e3:.0f} ms for "
                "slower ones (mean over ranks)."
            )
            self._console.print(comparison_text(found, balanced=bool(self._options.balancing)))
            if words := self.measurements.slowdown_in_words():
                self._console.print(words)
            if found.notes and not any(rank.migrated + rank.resharded for rank in found.ranks):
                self._console.print(f"Nothing was migrated: {found.notes[-1].rstrip('.')}.")
        if self.measurements.accuracy:
            self._console.print(
                f"Accuracy on held-out {self._accuracy_of}: {self.measurements.accuracy[-1]:.1%} ({self._baseline})."
            )
        self.print_files(self._options, "summary", "checkpoint")
