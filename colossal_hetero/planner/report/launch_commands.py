"""Commands that launch a plan's ranks, and the lines of the training script that make the plugin."""

from __future__ import annotations

import itertools
from collections import Counter

from ...common.text import count, spans
from ..cost.plan import Plan
from ..cost.runnable import why_not_runnable

MAX_NODES = 4
"""Number of consecutive nodes with equally many ranks above which they share a command."""
MAX_REPLICAS = 12
"""Number of unequal replicas whose samples are written out."""


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
        "# train with booster.execute_pipeline(...), which divides them",
    ]
    if plan.schedule == "zbv":
        lines.append("# the first stage has the loss; batches cannot be evaluated in this schedule")
    return "\n".join(lines)


def launch_lines(plan: Plan) -> list[str]:
    """One ``torchrun`` command per node, in the order of ranks; many consecutive nodes that are alike share one."""
    node_of = {rank: stage.node for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    used = sorted(node_of)
    nodes = list(Counter(node_of[rank] for rank in used).items())
    lines = []
    if used != list(range(len(used))):
        lines.append(
            f"# only the cluster's devices {spans(used)} are used: make only these visible (CUDA_VISIBLE_DEVICES); "
            f"they are launched as ranks 0-{len(used) - 1}"
        )
    if len(nodes) == 1:
        return [*lines, f"torchrun --nproc-per-node {len(used)} train.py"]
    line = f"torchrun --nnodes {len(nodes)} --node-rank {{}} --nproc-per-node {{}} --master-addr {nodes[0][0]} train.py"
    for ranks, group in itertools.groupby(enumerate(nodes), key=lambda each: each[1][1]):
        members = [(index, name) for index, (name, _) in group]
        (start, first), (stop, last) = members[0], members[-1]
        if len(members) > MAX_NODES:
            lines.append(f"{line.format('$N', ranks)}  # on {first}, …, {last}: N = {start}, …, {stop}")
        else:
            lines += [f"{line.format(index, ranks)}  # on {name}" for index, name in members]
    return lines


def _batch_lines(plan: Plan) -> list[str]:
    counts = [replica.micro_batches for replica in plan.replicas]
    if plan.symmetric:
        return [
            f"# the data loader of every replica gives {count(counts[0] * plan.micro_batch, 'sample')} per step: "
            f"{count(counts[0], 'micro-batch')} of {plan.micro_batch}"
        ]
    shares = ", ".join(str(each * plan.micro_batch) for each in counts[:MAX_REPLICAS])
    return [
        "loader = plugin.prepare_dataloader(dataset, shuffle=True, drop_last=True)  # without a batch_size",
        f"# it gives the replicas {shares}{', …' if len(counts) > MAX_REPLICAS else ''} samples of each step, in "
        f"micro-batches of {plan.micro_batch}",
    ]
