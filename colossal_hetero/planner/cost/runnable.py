"""The one rule for which plans can be run, of the search, the command, the reports and the plugin.

With 1F1B, replicas may have different stages and batches, and stages may recompute; with other schedules not. ZeRO
stage 1 runs by Colossal-AI's optimizer if replicas are alike, else by the plugin's.
"""

from typing import Any

from ...common.text import count, spans
from .layout_line import layout_of, write_layout
from .pass_order import why_not_schedulable
from .plan import Plan


class NoPlanError(ValueError):
    """There is no plan for these machines; for others there may be one."""


def enough_micro_batches(stages: Any, micro_batches: Any) -> Any:
    """True if a replica with this many micro-batches per iteration can have this many stages: numbers, or arrays."""
    return (stages <= micro_batches) | (stages == 1)


def why_not_runnable(plan: Plan, ranks: int | None = None) -> str | None:
    """Reason why :class:`.HeteroHybridParallelPlugin` cannot run ``plan``; None if it can."""
    if ranks is not None and plan.world_size < ranks:
        used = {rank for replica in plan.rank_order for group in replica for rank in group}
        idle = [rank for rank in range(ranks) if rank not in used]
        return (
            f"the plan uses {count(plan.world_size, 'device')} and leaves others idle (rank {spans(idle)}), but "
            f"{ranks} ranks were started, and each needs a place; start {plan.world_size} on the devices that it uses, "
            "or plan for a cluster file in which all devices are worth using"
        )
    if ranks is not None and plan.world_size > ranks:
        return (
            f"the plan is for {plan.world_size} ranks, but {ranks} were started; start {plan.world_size}, or plan for "
            f"{count(ranks, 'device')}"
        )
    if plan.schedule != "1f1b":
        for number, replica in enumerate(plan.replicas):
            for index, stage in enumerate(replica.stages):
                if stage.recompute:
                    return (
                        f"stage {index} of replica {number} runs its forward passes again in the backward passes, "
                        f"which is possible with the schedule 1f1b only, not with {plan.schedule}"
                    )
    if not plan.symmetric and plan.schedule != "1f1b":
        layout = write_layout(layout_of(plan), shortened=True)
        return (
            f"the plan's {len(plan.replicas)} replicas are not alike ({layout}), "
            f"which is possible with the schedule 1f1b only, not with {plan.schedule}; plan again with --schedule 1f1b"
        )
    for number, replica in enumerate(plan.replicas):
        stages, micro_batches = len(replica.stages), replica.micro_batches
        problem = why_not_schedulable(plan.schedule, stages, micro_batches)
        if problem is not None:
            who = "the plan" if plan.symmetric else f"replica {number}"
            return (
                f"{who} has {count(micro_batches, 'micro-batch')} for {count(stages, 'stage')}, but {problem}; plan "
                "with smaller micro-batches or a larger global batch"
            )
    return None
