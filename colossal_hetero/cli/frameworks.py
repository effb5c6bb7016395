"""A plan as the commands and files with which this package or another framework runs it, or why it cannot.

Read for the others: Megatron-LM core 0.20.0, commit d98e8a64 (``megatron/training/arguments.py`` and ``initialize.py``,
``megatron/core/transformer/pipeline_parallel_layer_layout.py`` and ``transformer_config.py``); DeepSpeed 0.19.6, commit
edaa7221 (``deepspeed/runtime/pipe/{module,topology,engine}.py``, ``deepspeed/runtime/{engine,config}.py``,
``deepspeed/utils/groups.py``); FlagScale 0.8.0, commit 16a2dd5b (``flagscale/train/arguments.py``,
``flagscale/train/hetero/parallel_context.py``, ``flagscale/runner/{runner_train,utils}.py``); Colossal-AI 0.5.0
(``booster/plugin/hybrid_parallel_plugin.py``, ``pipeline/stage_manager.py``, ``shardformer/modeling/llama.py``).
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..common.text import count, spans
from ..planner.cluster.topology import Topology
from ..planner.cost.plan import Plan
from ..planner.cost.runnable import why_not_runnable
from ..planner.report.plan_table import layout

PRECISIONS = ("fp32", "bf16", "fp16")
DATA_FIRST = "tensor, data, pipeline"
PIPELINE_FIRST = "tensor, pipeline, data"
"""Orders of ranks: the dimension in which consecutive ranks differ comes first."""

MAX_NODES = 4  # number of consecutive nodes with equally many ranks above which they share a command
MAX_REPLICAS = 12  # number of unequal replicas whose samples are written out


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


# Other frameworks ----------------------------------------------------------------------------------------------------


class NodeRanks(NamedTuple):
    """Consecutive ranks on one node."""

    node: str
    ranks: range
    devices: str
    """Numbers inside the node of their devices, "0,1,3"."""
    kind: str  # one word; of several kinds all


class FrameworkJob(NamedTuple):
    """A plan with equal replicas, in a framework's order of ranks."""

    plan: Plan
    overlap: bool
    order: str
    rows: tuple[NodeRanks, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Ranks of a tensor-parallel group, replicas, and stages."""
        return self.plan.tensor_parallel, len(self.plan.replicas), len(self.plan.replicas[0].stages)

    @property
    def zero_stage(self) -> int:
        return 1 if self.overlap else self.plan.zero_stage

    @property
    def recompute(self) -> list[int]:
        """Stages that recompute their activations."""
        return [number for number, stage in enumerate(self.plan.replicas[0].stages) if stage.recompute]

    @property
    def equal_layers(self) -> bool:
        return len(set(self.plan.layers_per_chunk)) == 1

    @property
    def split_nodes(self) -> str:
        """Nodes whose ranks are not consecutive, as torchrun numbers them."""
        nodes = [row.node for row in self.rows]
        return ", ".join(dict.fromkeys(node for node in nodes if nodes.count(node) > 1))


def plan_for(framework: str, plan: Plan, topology: Topology, *, overlap: bool = False) -> str:
    """The arguments and files with which a ``framework`` in :data:`FRAMEWORKS` runs the plan, which was made for these
    machines, or why it cannot. With ``overlap``, the plan counts on communication that overlaps with passes."""
    name, orders, write = FRAMEWORKS[framework]
    reasons = [
        f"its replicas are not alike ({layout(plan)}), and in {name} all have the same stages and equally many "
        "micro-batches; plan again with --equal"
    ]
    if plan.symmetric:
        overlap = overlap and len(plan.replicas) > 1
        jobs = [FrameworkJob(plan, overlap, order, _rows(plan, topology, order)) for order in orders]
        job = next((each for each in jobs if not each.split_nodes), jobs[0])
        reasons = _reasons(framework, name, job)
        if not reasons:
            return "\n".join(write(job))
    return "\n".join([f"# {name} cannot run this plan:", *(f"# - {reason}" for reason in reasons)])


def _reasons(framework: str, name: str, job: FrameworkJob) -> list[str]:
    plan, chosen, (_, _, stages) = job.plan, job.recompute, job.sizes
    unlike = len({tuple(stage.recompute for stage in replica.stages) for replica in plan.replicas}) > 1
    partly, chunked = 0 < len(chosen) < stages, plan.schedule != "1f1b"
    some = f"only {'stages' if len(chosen) > 1 else 'stage'} {spans(chosen)} of {stages} recompute activations, and"
    layers = f"its parts have {', '.join(map(str, plan.layers_per_chunk))} layers, and"
    schedule = f"its schedule is {plan.schedule}, and"
    hidden = "it counts on communication that overlaps with passes, and"
    stored, simple = "plan again with --no-recompute", "plan again with --schedule 1f1b"
    waiting, here = "plan again without --overlap", "or train with this package"
    known = f"its precision is {plan.precision}; arguments are known for {', '.join(PRECISIONS)}"
    general = [
        (unlike, f"a stage recomputes activations in some replicas only, and in {name} in all or none; {stored}"),
        (plan.precision not in PRECISIONS, known),
    ]
    uneven = "no partition_method of PipelineModule takes such numbers; plan again with --method uniform"
    apart = f"the ranks of node {job.split_nodes} would not be consecutive, and its runner numbers ranks node by node"
    zero = "it has ZeRO stage 1 in fp32, and HybridParallelPlugin has ZeRO in bf16 and fp16 only; plan again"
    without_zero = "without --overlap" if job.overlap else "with --zero-stages 0"
    own = {
        "megatron": [
            (plan.schedule == "zbv", f"{schedule} Megatron-LM has 1F1B and interleaved schedules only; {simple}"),
            (partly, f"{some} the options --recompute-… are the same in all stages; {stored}"),
        ],
        "deepspeed": [
            (chunked, f"{schedule} DeepSpeed's pipelines run 1F1B only; {simple}"),
            (not job.equal_layers, f"{layers} {uneven}, or write the layers of each stage as one LayerSpec"),
            (partly, f"{some} activation_checkpoint_interval is the same in all stages; {stored}"),
            (job.overlap, f"{hidden} DeepSpeed overlaps neither sums in pipelines nor ZeRO 1's gathering; {waiting}"),
        ],
        "flagscale": [
            (chunked, f"{schedule} its heterogeneous training has neither virtual stages nor zero bubbles; {simple}"),
            (bool(job.split_nodes), f"{apart}; --format megatron shows which device each rank has to be"),
        ],
        "colossalai": [
            (chunked and not job.equal_layers, f"{layers} num_layers_per_stage is for 1F1B only; {simple}, {here}"),
            (bool(job.zero_stage) and plan.precision == "fp32", f"{zero} {without_zero}, {here}"),
            (
                job.overlap and stages > 1,
                f"{hidden} its pipelines sum gradients after the last pass; {waiting}, {here}",
            ),
        ],
    }
    return [reason for wrong, reason in [*general, *own[framework]] if wrong]


def _rows(plan: Plan, topology: Topology, order: str) -> tuple[NodeRanks, ...]:
    """The places of ranks. Replicas, nodes and the devices of a node may have any order, so replicas on the same nodes
    follow each other."""

    def ordered(replicas: Sequence[tuple[tuple[int, ...], ...]]) -> list[int]:
        lines = zip(*replicas, strict=True) if order == DATA_FIRST else replicas
        return [device for groups in lines for ranks in groups for device in ranks]

    node_of = [device.node for device in topology.devices]
    seen = {node: number for number, node in enumerate(dict.fromkeys(node_of[d] for d in ordered(plan.rank_order)))}
    replicas = sorted(plan.rank_order, key=lambda each: [seen[node_of[d]] for ranks in each for d in ranks])
    kinds = {rank: stage.device for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    rows: list[NodeRanks] = []
    first = 0
    for number, run in itertools.groupby(ordered(replicas), key=node_of.__getitem__):
        devices, node = list(run), topology.nodes[number]
        inside = ",".join(str(node.devices.index(device)) for device in devices)
        ranks = range(first, first + len(devices))
        rows.append(NodeRanks(node.name, ranks, inside, _one_word(kinds[device] for device in devices)))
        first += len(devices)
    return tuple(rows)


def _one_word(kinds: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(re.sub(r"[^\w.-]+", "-", kind) for kind in kinds))


def _launch(job: FrameworkJob, script: str, options: Sequence[str] = ()) -> list[str]:
    """The node and device of each rank as a comment, and the command that starts a node's ranks."""
    total, first = job.rows[-1].ranks.stop, job.rows[0].node
    lines: list[tuple[str, ...]]
    if job.split_nodes:
        lines = [("node", "ranks", "LOCAL_RANK"), *((row.node, spans(row.ranks), row.devices) for row in job.rows)]
        how = (
            f". The ranks of node {job.split_nodes} are not consecutive, as torchrun would number them: start each "
            f"process with its RANK and LOCAL_RANK, WORLD_SIZE={total}, MASTER_ADDR={first} and a MASTER_PORT"
        )
        command = f"python {script}"
    else:
        lines = [("$N", "node", "$n", "ranks", "CUDA_VISIBLE_DEVICES")]
        for number, row in enumerate(job.rows):
            lines.append((f"{number}", row.node, f"{len(row.ranks)}", spans(row.ranks), row.devices))
        how = ", node by node"
        command = f"torchrun --nnodes {len(job.rows)} --node-rank $N --nproc-per-node $n --master-addr {first} {script}"
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    head = f"# {count(total, 'rank')} in the order {job.order}{how}:"
    return [head, *(f"#   {line.rstrip()}" for line in table), " \\\n    ".join([command, *options])]


def _megatron(job: FrameworkJob) -> list[str]:
    plan, (tensor, _, stages) = job.plan, job.sizes
    options = [f"--num-layers {plan.blocks}"]
    options.append(f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {stages}")
    if job.order == PIPELINE_FIRST:
        options.append("--use-tp-pp-dp-mapping")
    if not job.equal_layers:  # by stage or chunk in the order of the model, where the embedding is E and the loss L
        layers = "|".join(f"t*{number}" for number in plan.layers_per_chunk)
        options.append(f"--pipeline-model-parallel-layout 'E{layers}L'")
    elif plan.chunks_per_stage > 1:
        options.append(f"--num-virtual-stages-per-pipeline-rank {plan.chunks_per_stage}")
    options.append(f"--micro-batch-size {plan.micro_batch} --global-batch-size {plan.global_batch}")
    if plan.precision != "fp32":
        options.append(f"--{plan.precision}")
    if job.recompute:
        options.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if job.zero_stage:
        options.append("--use-distributed-optimizer" + " --overlap-grad-reduce --overlap-param-gather" * job.overlap)
    head = "# Megatron-LM core 0.20.0: the arguments of the plan; those of the model, optimizer and data are yours"
    return [head, *_launch(job, "pretrain_gpt.py", options)]


def _deepspeed(job: FrameworkJob) -> list[str]:
    plan, (tensor, replicas, stages) = job.plan, job.sizes
    config: dict[str, object] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.replicas[0].micro_batches,
        "zero_optimization": {"stage": plan.zero_stage},
    }
    if plan.precision != "fp32":
        config[plan.precision] = {"enabled": True}
    if stages == 1 and tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
    axes = f"PipeModelDataParallelTopology(num_pp={stages}, num_mp={tensor}, num_dp={replicas})"
    if job.order == PIPELINE_FIRST:
        axes = f'ProcessTopology(axes=["data", "pipe", "model"], dims=[{replicas}, {stages}, {tensor}])'
    arguments = ["layers, topology=topology", 'partition_method="type:^Block$"']
    if job.recompute:
        arguments.append('activation_checkpoint_interval=1, checkpointable_layers=["Block"]')
    script = ["# layers: the embedding, a LayerSpec of your class Block for each layer, and the head"]
    if tensor > 1:
        script.append("# Block divides its weights over the axis model of the topology itself")
    script += [f"topology = {axes}  # of deepspeed.runtime.pipe.topology", *_call("model = PipelineModule", arguments)]
    if stages == 1:
        script = ["model.gradient_checkpointing_enable()  # every block"] * bool(job.recompute)
    made = 'deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")'
    files = ["# DeepSpeed 0.19.6, ds_config.json:", json.dumps(config, indent=2), "# train.py:", *script]
    return [*files, f"engine, *_ = {made}", *_launch(job, "train.py")]


def _call(start: str, arguments: Sequence[str]) -> list[str]:
    return [f"{start}(", *(f"    {each}," for each in arguments), ")"]


def _flagscale(job: FrameworkJob) -> list[str]:
    plan, (tensor, replicas, stages) = job.plan, job.sizes
    meshes = _meshes(job)
    kinds = [kind for kind, _ in meshes]
    system: dict[str, object] = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
    if job.zero_stage:
        system |= {"use_distributed_optimizer": True}
    if job.overlap:
        system |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    system["hetero"] = {
        "enable_hetero": True,
        "hetero_process_meshes": [size for _, number in meshes for size in (tensor, 1, 1, replicas, number)],
        "hetero_pipeline_layer_split": plan.layers_per_stage,
        "hetero_device_types": kinds,
        "hetero_current_device_type": kinds[0],
    }
    if job.recompute:
        whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        flags = [[1, plan.replicas[0].micro_batches, int(stage in job.recompute)] for stage in range(stages)]
        system["recompute"] = whole | {"recompute_granularity_per_stage_micro_batch": flags}
    if plan.precision != "fp32":
        system["precision"] = {plan.precision: True}
    model = {"num_layers": plan.blocks, "micro_batch_size": plan.micro_batch, "global_batch_size": plan.global_batch}
    envs = {"node_specific": {json.dumps(row.node): {"CUDA_VISIBLE_DEVICES": row.devices} for row in job.rows}}
    runner = {"backend": "torchrun", "hostfile": "hostfile", "rdzv_backend": "static"}
    types = [row.kind if row.kind in kinds else kinds[0] for row in job.rows]
    return [
        "# FlagScale 0.8.0, hostfile:",
        *(f"{row.node} slots={len(row.ranks)} type={kind}" for row, kind in zip(job.rows, types, strict=True)),
        "# in the file of the experiment:",
        *_yaml({"experiment": {"runner": runner, "envs": envs}}),
        "# in the file of the training, beside what the model, optimizer and data need; a mesh is the sizes of tensor,",
        "# context, expert, data and pipeline parallelism:",
        *_yaml({"system": system, "model": model}),
        *_launch(job, "")[:-1],
    ]


def _meshes(job: FrameworkJob) -> list[tuple[str, int]]:
    """A mesh for each kind of device, with its number of stages. FlagScale orders ranks by the kind of their node, so
    if a kind is in several parts of the pipeline, or a node or stage has several kinds, one mesh holds all stages."""
    stages = zip(*(replica.stages for replica in job.plan.replicas), strict=True)
    of_stages = [_one_word(stage.device for stage in same) for same in stages]
    meshes = [(kind, len(list(run))) for kind, run in itertools.groupby(of_stages)]
    kinds = [kind for kind, _ in meshes]
    if len(set(kinds)) == len(kinds) and all(row.kind in kinds for row in job.rows):
        return meshes
    return [("mixed", len(of_stages))]


def _yaml(content: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in content.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_yaml(value, f"{indent}  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines


def _colossalai(job: FrameworkJob) -> list[str]:
    plan, (tensor, _, stages), micro_batches = job.plan, job.sizes, job.plan.replicas[0].micro_batches
    arguments = [f'tp_size={tensor}, pp_size={stages}, precision="{plan.precision}"']
    if job.zero_stage:
        arguments.append("zero_stage=1" + ", overlap_allgather=True" * job.overlap)
    if job.order == DATA_FIRST:
        arguments.append("dp_outside=False")
    before = ["model.gradient_checkpointing_enable()  # every block"] * bool(job.recompute)
    micro = f"{micro_batches} micro-batches of {plan.micro_batch}"
    loader = f"# each step accumulates gradients over {micro} (loss / {micro_batches}; booster.no_sync but in the last)"
    if stages > 1:
        arguments.append(f"num_microbatches={micro_batches}, microbatch_size={plan.micro_batch}")
        loader = f"# the loader of each replica gives {count(micro_batches * plan.micro_batch, 'sample')} per step"
    if not job.equal_layers:
        arguments.append(f"num_layers_per_stage={list(plan.layers_per_stage)}")
    if 0 < len(job.recompute) < stages:
        layers = [number * (stage in job.recompute) for stage, number in enumerate(plan.layers_per_stage)]
        config = f"PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage={layers})"
        arguments.append(f"gradient_checkpoint_config={config}")
        before.insert(0, "# Llama, Mistral, Qwen2 and Command recompute in these stages; other models in all of them")
    if plan.schedule != "1f1b":
        arguments.append(f'pp_style="{plan.schedule}", num_model_chunks={plan.chunks_per_stage}')
    if plan.order_seconds is not None:
        f, b, w, c = plan.order_seconds.model_dump().values()
        costs = [f"f_cost={f}, b_cost={b}, w_cost={w}, c_cost={c}", "f_mem=1, b_mem=0, w_mem=-1"]
        before.append("# PipelineGraph is in colossalai.pipeline.schedule.v_schedule")
        before += _call("graph = PipelineGraph", [f"n_stage={stages}, n_micro={micro_batches}", *costs])
        arguments.append("scheduler_nodes=graph.get_v_schedule()")
    plugin = _call("plugin = HybridParallelPlugin", arguments)
    return ["# Colossal-AI 0.5.0, without this package:", *before, *plugin, loader, *_launch(job, "train.py")]


FRAMEWORKS: dict[str, tuple[str, tuple[str, ...], Callable[[FrameworkJob], list[str]]]] = {
    "megatron": ("Megatron-LM", (DATA_FIRST, PIPELINE_FIRST), _megatron),
    "deepspeed": ("DeepSpeed", (DATA_FIRST, PIPELINE_FIRST), _deepspeed),
    "flagscale": ("FlagScale", (DATA_FIRST,), _flagscale),
    "colossalai": ("Colossal-AI", (PIPELINE_FIRST, DATA_FIRST), _colossalai),
}
