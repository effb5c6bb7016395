"""How a plan is run: how many ranks to launch where, and the plugin to make in the training script."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ...io.text import count, spans
from ..plans.plan import Plan

__all__ = ["colossal_order", "launch_lines", "training_call"]

MAX_NODES = 4
"""Nodes whose commands are written one by one."""

MAX_NUMBERS = 12
"""Numbers that are written one by one; longer rows are written in runs."""


def training_call(plan: Plan, path: str = "plan.json") -> str:
    """The commands that launch the plan and the Python that makes its plugin: ours, and Colossal-AI's own where that
    can run it too. For a plan that cannot be run, why, and what can be done.

    Args:
        path: of the plan's file.
    """
    problem = _why_not(plan)
    if problem:
        return "\n".join([*problem, f"# It can be simulated: colossal-hetero simulate {path}"])
    (micro_batches,) = {replica.micro_batches for replica in plan.replicas}
    samples = micro_batches * plan.micro_batch
    stages = len(plan.layers_per_stage)
    lines = [
        *launch_lines(plan),
        "",
        "from colossal_hetero import HeteroHybridParallelPlugin",
        f'plugin = HeteroHybridParallelPlugin(plan="{path}", precision="{plan.precision}")',
        f"# every replica's loader gives {count(samples, 'sample')} per step: "
        f"{count(micro_batches, 'micro-batch')} of {plan.micro_batch}",
    ]
    if stages == 1 and micro_batches > 1:
        lines.append(f"# without a pipeline nothing divides them: accumulate {micro_batches} backwards per step")
    own = _colossal_call(plan, stages)
    return "\n".join([*lines, "", *own])


def _colossal_call(plan: Plan, stages: int) -> list[str]:
    order = colossal_order(plan)
    if order is None:
        place, wanted, given = _first_difference(plan)
        return [
            "# Colossal-AI's own HybridParallelPlugin cannot run it: it takes the ranks as they are launched, which "
            f"makes {place} {_ranks(given)};",
            f"# the plan has {_ranks(wanted)} there",
        ]
    arguments = [f"tp_size={plan.tensor_parallel}", f"pp_size={stages}"]
    if stages > 1:
        arguments.append(f"num_layers_per_stage={_python_list(plan.layers_per_stage)}")
        arguments.append(f"microbatch_size={plan.micro_batch}")
    if order == "stages outside":
        arguments.append("dp_outside=False")
    arguments.append(f'precision="{plan.precision}"')
    return [
        "# the same without balancing, by Colossal-AI alone",
        "from colossalai.booster.plugin import HybridParallelPlugin",
        f"plugin = HybridParallelPlugin({', '.join(arguments)})",
    ]


def colossal_order(plan: Plan) -> str | None:
    """Which of the two orders of Colossal-AI's ``ProcessGroupMesh`` has the plan's ranks as they are launched.

    Returns:
        "replicas outside" for (dp, pp, tp), its default; "stages outside" for (pp, dp, tp), ``dp_outside=False``;
        None for neither.
    """
    order = plan.launched_order
    if len({len(replica) for replica in order}) > 1:
        return None
    ranks = np.array(order)
    launched = np.arange(ranks.size)
    if np.array_equal(ranks.ravel(), launched):
        return "replicas outside"
    if np.array_equal(ranks.swapaxes(0, 1).ravel(), launched):
        return "stages outside"
    return None


def _first_difference(plan: Plan) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Where the plan's ranks differ from Colossal-AI's default order: what is there, and what would be."""
    order = plan.launched_order
    launched = np.arange(plan.world_size).reshape(np.array(order).shape)
    for replica, stage in itertools.product(range(len(order)), range(len(order[0]))):
        given = tuple(int(rank) for rank in launched[replica, stage])
        if order[replica][stage] != given:
            return f"stage {stage} of replica {replica}", order[replica][stage], given
    raise AssertionError("called for a plan in default order")


def launch_lines(plan: Plan) -> list[str]:
    """One ``torchrun`` per node in the order of ranks; of many nodes those that run equally many share a line."""
    node_of = {rank: stage.node for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    used = sorted(node_of)
    nodes = [(name, len(list(ranks))) for name, ranks in itertools.groupby(used, key=node_of.__getitem__)]
    first = nodes[0][0]
    lines = []
    if used != list(range(len(used))):
        lines.append(
            f"# of the cluster's devices only {spans(used)} are used: let these alone be visible "
            f"(CUDA_VISIBLE_DEVICES); they are launched as ranks 0-{len(used) - 1}"
        )
    if len(nodes) == 1:
        return [*lines, f"torchrun --nproc-per-node {nodes[0][1]} train.py"]
    command = f"torchrun --nnodes {len(nodes)} --node-rank {{}} --nproc-per-node {{}} --master-addr {first} train.py"
    if len(nodes) <= MAX_NODES:
        return lines + [f"{command.format(index, ranks)}  # on {name}" for index, (name, ranks) in enumerate(nodes)]
    for ranks, group in itertools.groupby(enumerate(nodes), key=lambda each: each[1][1]):
        members = [(index, name) for index, (name, _) in group]
        (start, name), (stop, last) = members[0], members[-1]
        if start == stop:
            lines.append(f"{command.format(start, ranks)}  # on {name}")
        else:
            nodes_in_words = f"{name}, {last}" if stop == start + 1 else f"{name}, …, {last}"
            lines.append(f"{command.format('$N', ranks)}  # on {nodes_in_words}: N = {start}, …, {stop}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(sorted(ranks))}"


def _why_not(plan: Plan) -> list[str]:
    """Why the plan cannot be run, and what can be done; nothing if it can."""
    if not plan.symmetric:
        kinds: dict[tuple[tuple[int, ...], int], int] = {}
        for number, replica in enumerate(plan.replicas):
            layers = tuple(b - a for a, b in (stage.blocks for stage in replica.stages))
            kinds.setdefault((layers, replica.micro_batches), number)
        shown = [
            f"replica {number} has {' + '.join(_runs(layers))} layers and {count(micro_batches, 'micro-batch')}"
            for (layers, micro_batches), number in list(kinds.items())[:3]
        ]
        more = f", and {len(kinds) - 3} more kinds" if len(kinds) > 3 else ""
        return [
            "# It cannot be run yet: its replicas are not alike, and Colossal-AI's process mesh gives all of them the "
            "same stages.",
            f"# {'; '.join(shown)}{more}.",
            "# With --symmetric only plans are made that run.",
        ]
    stages, micro_batches = len(plan.layers_per_stage), plan.replicas[0].micro_batches
    if stages > 1 and micro_batches < stages:
        return [
            f"# It cannot be run: it has {count(micro_batches, 'micro-batch')} for {stages} stages, and Colossal-AI's "
            "1F1B schedule needs at least one per stage.",
            "# Plan with smaller micro-batches or a larger global batch.",
        ]
    return []


def _runs(numbers: Sequence[int]) -> list[str]:
    """Few numbers one by one, many by how often they follow each other: "2", "4 × 3"."""
    if len(numbers) <= MAX_NUMBERS:
        return [str(number) for number in numbers]
    runs = [(number, len(list(run))) for number, run in itertools.groupby(numbers)]
    return [f"{times} × {number}" if times > 1 else str(number) for number, times in runs]


def _python_list(numbers: Sequence[int]) -> str:
    """As one writes it: ``[9, 9, 6]``, of many numbers ``[2] * 31 + [1]``."""
    if len(numbers) <= MAX_NUMBERS:
        return f"[{', '.join(map(str, numbers))}]"
    parts = []
    for repeated, run in itertools.groupby(
        ((number, len(list(run))) for number, run in itertools.groupby(numbers)), key=lambda each: each[1] > 1
    ):
        if repeated:
            parts += [f"[{number}] * {times}" for number, times in run]
        else:
            parts.append(f"[{', '.join(str(number) for number, _ in run)}]")
    return " + ".join(parts)
