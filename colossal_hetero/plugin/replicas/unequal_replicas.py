"""Replicas that are not alike, in the hybrid plugin: their groups, sums of gradients, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from colossalai.checkpoint_io import HybridParallelCheckpointIO

from ...planner.cost.plan import Plan
from .replica_optimizers import Sharing, replica_optimizers

BUCKET_MIB = 8
"""Gradients of a sum, unless ``ddp_bucket_cap_mb`` is given. On a CPU, memory for larger ones would come from the
system at each iteration, which takes as long as the copy into it."""

Ranks = tuple[int, ...]
MakeGroup = Callable[[Ranks], Any]


# Colossal-AI's hybrid plugin has one mesh of equal replicas; each rank gives it that of its own replica, ``(1, stages,
# tensor parallel, 1)``. All ranks make the groups of all replicas in one order: making a group is collective.


def groups_of(replica: Sequence[Ranks]) -> list[Ranks]:
    """Groups that Colossal-AI uses within a replica: ranks by stage and place in the tensor-parallel group."""
    groups: list[Ranks] = list(replica)
    groups += [(rank,) for stage in replica for rank in stage]
    for column in groups_for_messages(replica):
        groups.append(column)
        groups.append((column[0], column[-1]) if len(column) > 1 else column)  # stages that share weights
    groups.append(tuple(rank for stage in replica for rank in stage))
    return groups


def groups_for_messages(replica: Sequence[Ranks]) -> list[Ranks]:
    """Groups over which stages send: by place in the tensor-parallel groups, all ranks there.

    [Note: no sums beside messages] Gradients are not summed over these groups. A last stage starts sums before it sends
    its last gradients back. With NCCL, what a group does is in one order on each rank, so the stage before would wait
    for the gradients, and they for its sums.
    """
    return list(zip(*replica, strict=True))


def why_layer_sums(plan: Plan) -> tuple[str, str]:
    """Part of ``plan`` that is summed layer by layer, and another choice, both in words."""
    if not plan.symmetric:
        return "the plan's replicas are not alike", "choose a plan of equal replicas"
    return "gradients are summed layer by layer", "leave layer_sums out of PlanConfig"


def check_arguments(plan: Plan, arguments: Mapping[str, Any], with_batches: bool) -> None:
    reason = why_not_unequal(arguments, with_batches)
    if reason is not None:
        form, remedy = why_layer_sums(plan)
        raise ValueError(f"{form}, and then {reason}, or {remedy}")


def why_not_unequal(arguments: Mapping[str, Any], with_batches: bool) -> str | None:
    """Reason why plans with layer sums cannot be run with these arguments of the hybrid plugin; None if they can."""
    zero_stage = arguments.get("zero_stage", 0)
    if with_batches:
        return "the plan gives each replica its batches; leave batches out"
    if zero_stage not in (0, 1):
        return f"zero_stage={zero_stage} is not possible; use 0 or 1"
    if arguments.get("enable_sequence_parallelism") or (arguments.get("sp_size") or 1) > 1:
        return "sequence parallelism is not possible; leave enable_sequence_parallelism and sp_size out"
    if arguments.get("fp8_communication") or arguments.get("use_fp8"):
        return "fp8 is not possible; leave fp8_communication and use_fp8 out"
    if arguments.get("overlap_allgather"):
        return "overlap_allgather is not possible; leave it out (sums of gradients still overlap with backward passes)"
    return None


class UnequalReplicas:
    """Lets this rank run its own replica of a plan, and sums gradients layer by layer over all ranks that hold a layer.
    Made by all ranks at once."""

    shard_copies = 1  # ranks that hold each shard of ZeRO's optimizer state

    def __init__(self, plan: Plan, make_group: MakeGroup, idle: Sequence[int] = ()) -> None:
        """``idle`` ranks, which are not in the plan, are like replicas that hold no layer."""
        self.plan = plan
        rank = dist.get_rank()
        order = [*plan.rank_order, *(((each,),) for each in idle)]
        self.index = next(number for number, replica in enumerate(order) if any(rank in stage for stage in replica))
        self.own_order = order[self.index]
        self._make_group = make_group
        in_plan = [rank for replica in order for stage in replica for rank in stage]
        self._places = {rank: place for place, rank in enumerate(in_plan)}
        self.made: list[Any] = []  # all groups
        wanted = dict.fromkeys(ranks for replica in order for ranks in groups_of(replica))
        self._groups = {ranks: self._make(ranks) for ranks in wanted}
        # See [Note: no sums beside messages].
        for_messages = {ranks for replica in order for ranks in groups_for_messages(replica) if len(ranks) > 1}
        self._sums = {ranks: group for ranks, group in self._groups.items() if ranks not in for_messages}

    def group_of(self, ranks: Ranks) -> Any:
        """The group of these ranks, which exists already. Colossal-AI's mesh also asks for those without this rank."""
        return self._groups[ranks]

    def _make(self, ranks: Ranks) -> Any:
        self.made.append(self._make_group(ranks))
        return self.made[-1]

    def optimizers(self, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        if arguments.get("zero_stage"):
            max_elements = arguments.get("zero_bucket_size_in_m", 12) * 1024 * 1024
        else:
            max_elements = arguments.get("ddp_bucket_cap_mb", BUCKET_MIB) * 1024 * 1024 // 4
        early = arguments.get("overlap_communication", True)
        return replica_optimizers(Sharing(self._find_groups, max_elements, early, self.shard_copies))

    def _find_groups(self, wanted: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], Any]:
        for ranks in wanted:
            if ranks not in self._sums:
                # Sums are in the order of the plan, so that they are the same whichever rank computes what.
                self._sums[ranks] = self._make(tuple(sorted(ranks, key=self._places.__getitem__)))
        return self._sums


class ReplicaCheckpointIO(HybridParallelCheckpointIO):
    """``HybridParallelCheckpointIO`` for replicas that are not alike, of which the one with rank 0 writes."""

    def __init__(self, writes: bool, *args: Any) -> None:
        super().__init__(*args)
        self._writes = writes
        self.dp_rank = 0 if writes else 1  # what the parent class tells them by

    def save_optimizer(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_zero()
        if self._writes:
            super().save_optimizer(*args, **kwargs)

    def load_optimizer(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_zero()
        super().load_optimizer(*args, **kwargs)

    def _refuse_zero(self) -> None:
        if self.use_zero:
            raise NotImplementedError(
                "with ZeRO, the ranks that hold a layer share its optimizer state, which Colossal-AI's checkpoints "
                "cannot do if replicas are not alike; give the plugin checkpoints=CheckpointConfig(...), and use "
                "plugin.save and plugin.resume"
            )
