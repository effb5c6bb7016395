"""What the pipeline example shows and writes: measured layers, stages, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.cost.plan import Plan, save_plan
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.report.plan_table import one_line
from examples.common.comparison import ComparisonReport, Training
from examples.common.terminal import compact_table


@dataclass
class PipelineTraining(Training):
    """Training with stages made in one way."""

    plan: Plan | None = None

    @property
    def predicted_seconds(self) -> float:
        assert self.plan is not None
        return self.plan.iteration_seconds


class PipelineReport(ComparisonReport[PipelineTraining]):
    """See :class:`ComparisonReport`."""

    WAYS_ARE = "stages"
    FILES = ("summary", "profile", "plan", "plot")

    @property
    def FITTED(self) -> str:  # type: ignore[override]
        return "Any replicas" if self._options.way == "replicas" else "Stages that fit the devices"

    profile_seconds = 0.0
    """Time that measuring the layers took."""

    def profiled(self, seconds: float, profile: ModelProfile, topology: Topology) -> None:
        """The layers have been measured, or read from a file, in so many ``seconds``."""
        self.profile_seconds = seconds
        middle = profile.blocks // 2
        costs = [profile.costs(device.kind.name, 1, self._options.micro_batch) for device in topology.devices]
        blocks = ", ".join(
            f"{1e3 * (cost.forward_seconds[middle] + cost.backward_seconds[middle]):.1f} ms on rank {rank}"
            for rank, cost in enumerate(costs)
        )
        self._console.print(f"Layers measured ({seconds:.1f} s): a block takes {blocks}")

    def finish(self) -> dict[str, Any] | None:
        """Write the summary, the plan and its picture, and print the tables; the summary on rank 0, None elsewhere."""
        if self._first:
            plan = self.trainings[-1].plan
            assert plan is not None
            if self._options.plan is not None:
                save_plan(plan, self._options.plan)
            if self._options.plot is not None:
                from colossal_hetero.planner.cost.simulate import simulate_plan
                from colossal_hetero.planner.report.plan_picture import plot_plan

                plot_plan(simulate_plan(plan), self._options.plot)
        return super().finish()

    def _summary_of_run(self) -> dict[str, Any]:
        return {"profile_seconds": self.profile_seconds}

    def _summary_of(self, training: PipelineTraining) -> dict[str, Any]:
        assert training.plan is not None
        return {
            "way": training.name,
            "layout": one_line(training.plan),
            "stages": [
                {
                    "rank": stage.ranks[0],
                    "blocks": list(stage.blocks),
                    "predicted_seconds_per_micro_batch": stage.forward_seconds + stage.backward_seconds,
                    "peak_memory_bytes": training.peak_memory_bytes[stage.ranks[0]],
                }
                for replica in training.plan.replicas
                for stage in replica.stages
            ],
            **super()._summary_of(training),
        }

    def _rank_table(self) -> Any:
        columns = ("stage", "rank", *self._slowed_heading, "blocks", "forward", "backward", "communication")
        table = compact_table("Stages, predicted times of a micro-batch (in ms)", "stages", *columns)
        for training in self.trainings:
            assert training.plan is not None
            stages = [pair for replica in training.plan.replicas for pair in enumerate(replica.stages)]
            for row, (number, stage) in enumerate(stages):
                rank = stage.ranks[0]
                times = (stage.forward_seconds, stage.backward_seconds, stage.transfer_seconds)
                table.add_row(
                    training.name if row == 0 else "",
                    str(number),
                    str(rank),
                    *self._slowed(rank),
                    f"{stage.blocks[0]}-{stage.blocks[1] - 1}",
                    *(f"{seconds * 1e3:.1f}" for seconds in times),
                )
        return table
