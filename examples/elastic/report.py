"""What the elastic example shows and writes: progress, changes of the members, and throughput over time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from colossal_hetero.common.text import BLUE, ORANGE, save_figure
from examples.common.terminal import Terminal, compact_table, write_json

from .loop_trace import Finished, Loss, Step, World
from .options import Action, ElasticOptions

ENDS = {"kill": "killed", "leave": "left"}
"""What has become of a node, by the action."""


@dataclass(frozen=True)
class Change:
    """The members have become others."""

    step: int
    """Steps that were done."""
    before: int
    """Members."""
    after: int
    why: str
    plan: str
    """After it."""
    seconds: float | None
    """From the last step before it to the first one after it, which is made in this time. None if there is none."""
    received_bytes: int
    """By all members together."""
    iterations_repeated: int


class History:
    """What the members have done, as their traces say.

    Args:
        actions: what is done to nodes.
    """

    def __init__(self, actions: Sequence[Action] = ()) -> None:
        self._actions = actions
        self._steps: dict[int, list[Step]] = {}
        self._losses: dict[int, list[Loss]] = {}
        self._worlds: dict[tuple[int, int], list[World]] = {}
        """By the step after which it began, and a number if several did; an entry for each member."""
        self._starts: Counter[str] = Counter()
        self._times_started = 0
        self.finished: set[str] = set()
        """Nodes that have trained to the end."""
        self.nodes: set[str] = set()
        """Nodes that have been members."""
        self.restarts: list[int] = []
        """The step after which all members have started again, each time that they have."""

    def add(self, entries: Iterable[Any]) -> None:
        """Add entries of traces."""
        for entry in entries:
            if isinstance(entry, Step):
                self._steps.setdefault(entry.step, []).append(entry)
            elif isinstance(entry, Loss):
                self._losses.setdefault(entry.step, []).append(entry)
            elif isinstance(entry, World):
                if entry.started and not entry.received_bytes:  # it got its state from a checkpoint, or begins
                    self._starts[entry.node] += 1
                    if self._starts[entry.node] > self._times_started:  # others may have begun, and be further, already
                        self._times_started += 1
                        self._forget_after(entry.since)
                self.nodes.add(entry.node)
                self._add_world(entry)
            elif isinstance(entry, Finished):
                self.finished.add(entry.node)

    def _add_world(self, entry: World) -> None:
        for number in itertools.count():
            world = self._worlds.setdefault((entry.since, number), [])
            if all(each.members == entry.members and each.node != entry.node for each in world):
                world.append(entry)
                return

    def _forget_after(self, step: int) -> None:
        """All members have started again after this step."""
        if self.newest_step > step:
            self.restarts.append(step)

            def kept(entries: dict[int, list[Any]]) -> dict[int, list[Any]]:
                """Entries up to the step, and those of members that have written since they started again."""
                again = {
                    number: [entry for entry in found if number <= step or (entry.since == step > 0)]
                    for number, found in entries.items()
                }
                return {number: found for number, found in again.items() if found}

            self._steps, self._losses = kept(self._steps), kept(self._losses)
            self._worlds = {key: world for key, world in self._worlds.items() if key[0] <= step > 0}

    @property
    def newest_step(self) -> int:
        """Number of steps that are done."""
        return max(self._steps, default=0)

    @property
    def members(self) -> int:
        """How many there are now; 0 before the first world."""
        return self._worlds[max(self._worlds)][0].members if self._worlds else 0

    def times(self) -> dict[int, float]:
        """When each step was made, in seconds since the epoch of the clock: by the first member that made it."""
        return {step: min(entry.time for entry in entries) for step, entries in sorted(self._steps.items())}

    def losses(self) -> dict[int, float]:
        """The loss of each step that is made over its whole global batch. The step is missing of which a part is
        unknown, because a member has died before its passes were done."""
        losses = {}
        for step in sorted(self._steps):
            entries = self._losses.get(step, [])
            for since in {entry.since for entry in entries}:
                known = {entry.node: entry for entry in entries if entry.since == since}
                if abs(sum(entry.share for entry in known.values()) - 1) < 1e-9:
                    losses[step] = sum(entry.share * entry.loss for entry in known.values())
        return losses

    def changes(self) -> list[Change]:
        """The changes of the members, in their order."""
        times, changes = self.times(), []
        worlds = sorted(self._worlds.items())
        if worlds and len(worlds[-1][1]) < worlds[-1][1][0].members:
            worlds.pop()  # not all members have written yet
        stepped: dict[int, set[str]] = {}
        for entry in itertools.chain.from_iterable(self._steps.values()):
            stepped.setdefault(entry.since, set()).add(entry.node)
        new: set[str] = set()
        for ((began, _), before), ((since, _), after) in itertools.pairwise(worlds):
            old = new if len(before) < before[0].members else set()
            # A node that was killed may not have written that the world before began, or the one after.
            old |= {world.node for world in before} | stepped.get(began, set())
            new = {world.node for world in after}
            if len(old | new) == after[0].members:
                new |= old
            start, stop = times.get(since), times.get(since + 1)
            changes.append(
                Change(
                    step=since,
                    before=before[0].members,
                    after=after[0].members,
                    why=", ".join(
                        [
                            *(self._end_of(node, since) for node in sorted(old - new)),
                            *(f"{node} joined" for node in sorted(new - old)),
                            *["all started again"] * all(world.started and not world.received_bytes for world in after),
                        ]
                    ),
                    plan=after[0].plan,
                    seconds=None if start is None or stop is None else stop - start,
                    received_bytes=sum(world.received_bytes for world in after),
                    iterations_repeated=max(world.iterations_repeated for world in after),
                )
            )
        return changes

    def _end_of(self, node: str, step: int) -> str:
        """How a node has ended that is not a member after this step."""
        kinds = [action.kind for action in self._actions if action.node == node and action.step <= step]
        return f"{node} {ENDS.get(kinds[-1], 'lost') if kinds else 'lost'}"


@dataclass(frozen=True)
class Comparison:
    """The job against training that nothing has happened to."""

    loss_difference: float
    """The largest one of any step."""
    losses_compared: int
    """Steps whose loss is known."""
    parameter_difference: float
    """The largest one of any element at the end."""
    accuracy: float
    """Of the job, on images held out, in [0, 1]."""
    undisturbed_accuracy: float


class ElasticReport(Terminal):
    """Follows the job and the undisturbed training; prints, draws and writes.

    Args:
        options: the command line.
        quiet: whether nothing is printed.
    """

    def __init__(self, options: ElasticOptions, quiet: bool = False) -> None:
        super().__init__(not quiet, "{task.description}", "{task.fields[state]}")
        self._options = options

    def begin(self, what: str, steps: int | None) -> None:
        """Show the progress of training from now on."""
        self._task = self._progress.add_task(what, total=steps, state="")
        self._progress.start()

    def progress(self, steps: int, state: str) -> None:
        """So many steps are done."""
        self._progress.update(self._task, completed=steps, state=state)

    def end(self) -> None:
        """Training has ended."""
        self._progress.remove_task(self._task)

    def finish(self, history: History, comparison: Comparison) -> dict[str, Any]:
        """Print the table and write the files; the summary."""
        changes = history.changes()
        self._console.print(_table(changes))
        self.line(
            f"Largest difference from the undisturbed run: losses {comparison.loss_difference:.1e} "
            f"({comparison.losses_compared} of {history.newest_step} steps), "
            f"parameters {comparison.parameter_difference:.1e}."
        )
        self.line(
            f"Accuracy on held-out images: {comparison.accuracy:.1%}, "
            f"undisturbed {comparison.undisturbed_accuracy:.1%}."
        )
        if self._options.plot is not None:
            plot_throughput(history.times(), changes, self._options.global_batch, self._options.plot)
        summary = {
            "schema": 1,
            "args": self._options.as_json(),
            "steps": history.newest_step,
            "restarts": history.restarts,
            "changes": [asdict(change) for change in changes],
            "comparison": asdict(comparison),
        }
        if self._options.summary is not None:
            write_json(summary, self._options.summary)
        self.print_files(self._options, "summary", "plot")
        return summary


def _table(changes: Sequence[Change]) -> Any:
    columns = ("step", "members", "s to next step", "MB moved", "repeated")
    table = compact_table("Changes of the members", "why", *columns)
    for change in changes:
        table.add_row(
            change.why,
            str(change.step),
            f"{change.before} → {change.after}",
            "" if change.seconds is None else f"{change.seconds:.1f}",
            f"{change.received_bytes / 1e6:.1f}",
            str(change.iterations_repeated),
        )
    return table


def throughput(times: Mapping[int, float], global_batch: int) -> tuple[list[float], list[float]]:
    """Edges of the intervals between steps, in seconds from the first step, and samples per second in each interval."""
    steps = sorted(times)
    edges = [times[step] - times[steps[0]] for step in steps]
    rates = [
        (after - before) * global_batch / max(stop - start, 1e-9)
        for before, after, start, stop in zip(steps, steps[1:], edges, edges[1:], strict=False)
    ]
    return edges, rates


def plot_throughput(times: Mapping[int, float], changes: Sequence[Change], global_batch: int, path: Path) -> None:
    """Draw samples per second over time, with the changes of the members."""
    from matplotlib.figure import Figure

    edges, rates = throughput(times, global_batch)
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.add_subplot()
    axis.stairs(rates, edges, color=BLUE, fill=True, alpha=0.8)
    top = 2.5 * median(rates)
    for number, change in enumerate(changes):
        if change.step in times:
            at = times[change.step] - min(times.values())
            axis.axvline(at, color=ORANGE, linewidth=2)
            words = f"{change.why}: {change.before} → {change.after}".split(", ")
            label = "\n".join(f" {each}" for each in words)
            axis.text(at, top * (0.98 - 0.1 * (number % 3)), label, va="top", fontsize=9)
    axis.set(xlabel="seconds from the first step", ylabel="samples per second", ylim=(0, top), xlim=(0, edges[-1]))
    save_figure(figure, path)
