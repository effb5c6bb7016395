"""Commands that launch a plan's ranks, and the lines of the training script that make the plugin."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ...common.text import count, spans
from ..cost.plan import Plan
from ..cost.runnable import why_not_runnable, why_recomputes

__all__ = ["colossal_order", "launch_lines", "training_call"]

MAX_NODES = 4
MAX_NUMBERS = 12
"""Longest list that is written out; longer ones become sums of repeated numbers."""


def training_call(plan: Plan, path: str = "plan.json", *, overlap: bool = False) -> str:
    """The commands that launch the plan and the Python that makes the plugin, or why it cannot be run."""
    problem = why_not_runnable(plan)
    if problem is not None:
        return f"# It cannot be run: {problem}.\n# It can be simulated: colossal-hetero simulate {path}"
    # Where gradients are summed layer by layer, parameters are not gathered while the model computes.
    gathered = ", overlap_allgather=True" if plan.symmetric else ""
    zero = "" if plan.zero_stage else ", zero_stage=1"
    options = f"{zero}, overlap_communication=True{gathered}" if overlap else ""
    lines = [
        *launch_lines(plan),
        "",
        "from colossal_hetero import HeteroHybridParallelPlugin",
        f'plugin = HeteroHybridParallelPlugin(plan="{path}", precision="{plan.precision}"{options})',
        *_batch_lines(plan),
    ]
    lines.append("# train with booster.execute_pipeline(...), which divides them")
    if plan.schedule == "zbv":
        lines.append("# the first stage has the loss; batches cannot be evaluated in this schedule")
    return "\n".join([*lines, "", *_colossal_call(plan)])


def _ranks_by_node(plan: Plan) -> dict[str, int]:
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    node_of = {rank: stage.node for stage in stages for rank in stage.ranks}
    return dict(Counter(node_of[rank] for rank in sorted(node_of)))


def _batch_lines(plan: Plan) -> list[str]:
    counts = [replica.micro_batches for replica in plan.replicas]
    if plan.symmetric:
        return [
            f"# the data loader of every replica gives {count(counts[0] * plan.micro_batch, 'sample')} per step: "
            f"{count(counts[0], 'micro-batch')} of {plan.micro_batch}"
        ]
    shares = ", ".join(str(each * plan.micro_batch) for each in counts[:MAX_NUMBERS])
    return [
        "loader = plugin.prepare_dataloader(dataset, shuffle=True, drop_last=True)  # without a batch_size",
        f"# it gives the replicas {shares}{', …' if len(counts) > MAX_NUMBERS else ''} samples of each step, in "
        f"micro-batches of {plan.micro_batch}",
    ]


def _colossal_call(plan: Plan) -> list[str]:
    if not plan.symmetric:
        return ["# Colossal-AI's own HybridParallelPlugin cannot run this plan: its replicas are not alike"]
    if plan.schedule != "1f1b" and len(set(plan.layers_per_chunk)) > 1:
        return ["# Colossal-AI's own HybridParallelPlugin cannot run this plan: it has no unequal chunks"]
    if plan.schedule == "zbv":
        return [
            "# Colossal-AI's own HybridParallelPlugin needs scheduler_nodes, which the plugin above makes from the plan"
        ]
    if plan.zero_stage and plan.precision == "fp32":
        return ["# Colossal-AI's own HybridParallelPlugin cannot run this plan: it refuses ZeRO in fp32"]
    if why_recomputes(plan) is not None:
        return [
            "# Colossal-AI's own HybridParallelPlugin lets single stages recompute for a few models only (its argument",
            "# gradient_checkpoint_config)",
        ]
    order = colossal_order(plan)
    if order is None:
        place, wanted, given = _first_difference(plan)
        return [
            "# Colossal-AI's own HybridParallelPlugin cannot run this plan: it places ranks in the order of launch,",
            f"# so {place} would be {_ranks(given)}, but the plan has {_ranks(wanted)} there",
        ]
    stages = len(plan.layers_per_stage)
    arguments = [f"tp_size={plan.tensor_parallel}", f"pp_size={stages}"]
    if stages > 1:
        if plan.schedule == "1f1b":
            arguments.append(f"num_layers_per_stage={_python_list(plan.layers_per_stage)}")
        else:
            arguments.append(f'pp_style="{plan.schedule}", num_model_chunks={plan.chunks_per_stage}')
        arguments.append(f"microbatch_size={plan.micro_batch}")
    if order == "stages outside":
        arguments.append("dp_outside=False")
    arguments.append(f'precision="{plan.precision}"')
    if plan.zero_stage:
        arguments.append("zero_stage=1")
    lines = [
        "# the same with Colossal-AI alone, without balancing",
        "from colossalai.booster.plugin import HybridParallelPlugin",
        f"plugin = HybridParallelPlugin({', '.join(arguments)})",
    ]
    micro_batches = plan.replicas[0].micro_batches
    if stages == 1 and micro_batches > 1:
        lines.append(
            f"# it has no execute_pipeline without a pipeline: accumulate {micro_batches} backward passes per step"
        )
    return lines


def colossal_order(plan: Plan) -> str | None:
    """The order of Colossal-AI's ``ProcessGroupMesh`` that places the ranks as the plan does, None for neither:
    "replicas outside" for (dp, pp, tp), its default; "stages outside" for (pp, dp, tp), ``dp_outside=False``."""
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
    """The first stage whose ranks differ from Colossal-AI's default order, in words, and its ranks in both orders."""
    order = plan.launched_order
    launched = np.arange(plan.world_size).reshape(np.array(order).shape)
    for replica, stage in itertools.product(range(len(order)), range(len(order[0]))):
        given = tuple(int(rank) for rank in launched[replica, stage])
        if order[replica][stage] != given:
            return f"stage {stage} of replica {replica}", order[replica][stage], given
    raise AssertionError("the plan is in the default order")


def launch_lines(plan: Plan) -> list[str]:
    """One ``torchrun`` command per node, in the order of ranks; above :data:`MAX_NODES`, alike nodes share one."""
    used = sorted(rank for replica in plan.replicas for stage in replica.stages for rank in stage.ranks)
    nodes = list(_ranks_by_node(plan).items())
    first = nodes[0][0]
    lines = []
    if used != list(range(len(used))):
        lines.append(
            f"# only the cluster's devices {spans(used)} are used: make only these visible (CUDA_VISIBLE_DEVICES); "
            f"they are launched as ranks 0-{len(used) - 1}"
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


def _python_list(numbers: Sequence[int]) -> str:
    """``[9, 9, 6]``; if there are many numbers, ``[2] * 31 + [1]``."""
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
