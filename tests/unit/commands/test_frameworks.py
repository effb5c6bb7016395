"""Plans for other frameworks: their arguments and files, the places of ranks, and what is refused."""

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.pipeline.schedule.v_schedule import PipelineGraph
from colossalai.shardformer import PipelineGradientCheckpointConfig
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.cli.frameworks import DATA_FIRST, FRAMEWORKS, plan_for
from colossal_hetero.cli.plan import plan as plan_command
from colossal_hetero.planner.cost.plan import Plan
from tests.support.machines import Nodes, machines
from tests.support.plans import GRAPH, chunked, chunked_stage, plan, replica, stage, unequal

TOPOLOGY = machines(Nodes("Ethernet", (4, 4, 4, 4)))
GOLDEN = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
"""The text of each format behind a line "=== NAME"."""


def equal(layers: Sequence[int] = (3, 3), recompute: Sequence[int] = (), **changes: Any) -> Plan:
    """Two replicas, tensor parallel over two devices; the first stage is on V100s of the second node."""
    ranges = list(pairwise(sum(layers[:number]) for number in range(len(layers) + 1)))
    kinds = [("V100-16", 4), ("A100-40", 0), ("T4", 8)]
    replicas = [
        replica(
            *(
                stage(*blocks, (first + 2 * r, first + 2 * r + 1), kind, recompute=number in recompute)
                for number, (blocks, (kind, first)) in enumerate(zip(ranges, kinds, strict=False))
            )
        )
        for r in range(2)
    ]
    return plan(*replicas, **{"precision": "bf16", **changes})


def two_chunks(schedule: str) -> Plan:
    ranges = {"interleaved": ([(0, 2), (4, 6)], [(2, 4), (6, 8)]), "zbv": ([(0, 2), (6, 8)], [(2, 4), (4, 6)])}
    stages = (chunked_stage(rank, each) for rank, each in enumerate(ranges[schedule]))
    return plan(replica(*stages), blocks=8, schedule=schedule, order_seconds=GRAPH if schedule == "zbv" else None)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_equal_plan(framework: str) -> None:
    expected = GOLDEN.partition(f"=== {framework}\n")[2].partition("\n===")[0].rstrip()
    assert plan_for(framework, equal(zero_stage=1, recompute=(0, 1)), TOPOLOGY) == expected
    (option,) = (each for each in plan_command.params if each.name == "framework")
    assert list(option.type.choices) == list(FRAMEWORKS)  # type: ignore[attr-defined]


MIXED = plan(*(replica(stage(0, 3, (2 * r,), recompute=r == 0), stage(3, 6, (2 * r + 1,))) for r in range(2)))
TORN = plan(replica(stage(0, 3, (0,)), stage(3, 5, (4,)), stage(5, 6, (1,))))
REFUSED = [
    *((name, unequal(), False, ["replicas are not alike", "plan again with --equal"]) for name in FRAMEWORKS),
    *((name, MIXED, False, ["in some replicas only", "--no-recompute"]) for name in FRAMEWORKS),
    *((name, equal(precision="fp8"), False, ["its precision is fp8"]) for name in FRAMEWORKS),
    ("megatron", two_chunks("zbv"), False, ["its schedule is zbv", "1F1B and interleaved"]),
    ("megatron", equal(recompute=[1]), False, ["only stage 1 of 2", "--recompute-…"]),
    ("deepspeed", equal((4, 2)), False, ["4, 2 layers", "partition_method", "--method uniform"]),
    ("deepspeed", equal((2, 2, 2), [0, 2]), False, ["only stages 0, 2 of 3", "activation_checkpoint_interval"]),
    ("deepspeed", equal(), True, ["overlaps neither", "--overlap"]),
    ("deepspeed", two_chunks("interleaved"), False, ["its schedule is interleaved", "1F1B only"]),
    ("flagscale", two_chunks("zbv"), False, ["neither virtual stages nor zero bubbles"]),
    ("flagscale", two_chunks("interleaved"), False, ["neither virtual stages nor zero bubbles"]),
    ("flagscale", TORN, False, ["node-0 would not be consecutive"]),
    *(("colossalai", chunked(name), False, ["2, 1, 2, 1 layers", "num_layers"]) for name in ("zbv", "interleaved")),
    ("colossalai", equal(precision="fp32", zero_stage=1), False, ["ZeRO stage 1 in fp32", "--zero-stages 0"]),
    ("colossalai", equal(), True, ["after the last pass", "--overlap"]),
]


@pytest.mark.parametrize(("framework", "made", "overlap", "words"), REFUSED)
def test_what_a_framework_cannot_run(framework: str, made: Plan, overlap: bool, words: list[str]) -> None:
    first, *reasons = plan_for(framework, made, TOPOLOGY, overlap=overlap).splitlines()
    assert first == f"# {FRAMEWORKS[framework][0]} cannot run this plan:"
    assert reasons and all(line.startswith("# - ") for line in reasons)
    assert all(word in "\n".join(reasons) for word in words)


def test_options_that_only_some_plans_have() -> None:
    layout = "--pipeline-model-parallel-layout 'Et*2|t*1|t*2|t*1L'"
    assert layout in plan_for("megatron", chunked(), TOPOLOGY)
    assert "--num-virtual-stages-per-pipeline-rank 2" in plan_for("megatron", two_chunks("interleaved"), TOPOLOGY)
    hidden = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    assert hidden in plan_for("megatron", equal(), TOPOLOGY, overlap=True)
    text = plan_for("megatron", TORN, TOPOLOGY)
    assert "node-0 are not consecutive" in text and "python pretrain_gpt.py" in text and "torchrun --" not in text
    # In the order of ranks tensor, pipeline, data, each pipeline is on a node of its own.
    rows = plan(*(replica(stage(0, 3, (4 * r,)), stage(3, 6, (4 * r + 1,))) for r in range(2)))
    assert "--use-tp-pp-dp-mapping" in plan_for("megatron", rows, TOPOLOGY)
    assert 'ProcessTopology(axes=["data", "pipe", "model"], dims=[2, 2, 1])' in plan_for("deepspeed", rows, TOPOLOGY)
    whole = plan_for("deepspeed", plan(replica(stage(0, 6, (0, 1)))), TOPOLOGY)
    assert '"autotp_size": 2' in whole and "PipelineModule" not in whole
    # FlagScale orders ranks by the kind of a node, so one that is in two places of the pipeline is not named.
    back = plan(replica(*(stage(s, s + 1, (4 * s,), kind) for s, kind in enumerate(("T4", "A100", "T4")))))
    assert 'hetero_device_types: ["mixed"]' in plan_for("flagscale", back, TOPOLOGY)
    some = yaml.safe_load(plan_for("flagscale", equal(recompute=[1]), TOPOLOGY).partition("parallelism:\n")[2])
    assert some["system"]["recompute"]["recompute_granularity_per_stage_micro_batch"] == [[1, 8, 0], [1, 8, 1]]


NUMBERS = {
    "megatron": (r"tensor-\S+-size (\d+)", r"pipeline-\S+-size (\d+)", r"micro-\S+-size (\d+)", r"t\*(\d+)"),
    "deepspeed": (r'(?:mp=|tp_size": |dims=.*, )(\d+)', r"(?:pp=|dims=\[\d+, )(\d+)", r'gpu": (\d+)', r"(?!)"),
    "flagscale": (r"tensor_\S+_size: (\d+)", r"pipeline_\S+_size: (\d+)", r"micro_\S+: (\d+)", r"split: \[(.*)\]"),
    "colossalai": (r"tp_size=(\d+)", r"pp_size=(\d+)", r"(?:batch_size=|batches of )(\d+)", r"stage=\[(.*)\]"),
}
"""Patterns of the tensor-parallel degree, the stages, the samples of a micro-batch, and layers by stage."""


def places(text: str) -> tuple[str, list[int]]:
    """The order of ranks, and the device of each rank as the cluster file numbers it."""
    (order,) = re.findall(r"^# \d+ ranks? in the order (tensor, \w+, \w+)", text, re.MULTILINE)
    rows = [line[1:].split() for line in text.splitlines() if line.startswith("#   ")]
    node, ranks = rows[0].index("node"), rows[0].index("ranks")
    devices = [4 * int(row[node][len("node-") :]) + int(each) for row in rows[1:] for each in row[-1].split(",")]
    assert rows[1][ranks].split("-")[0] == "0" and int(rows[-1][ranks].split("-")[-1]) == len(devices) - 1
    return order, devices


@given(st.data())
def test_the_text_says_the_plan(data: st.DataObject) -> None:
    tensor, copies, stages = (data.draw(st.integers(1, limit)) for limit in (2, 2, 4))
    layers = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    together = [4 * node + device for node in data.draw(st.permutations(range(4))) for device in range(4)]
    ranks = iter(data.draw(st.permutations(range(16)) | st.just(together)))
    ranges = list(pairwise(sum(layers[:number]) for number in range(stages + 1)))
    rows = [[stage(*each, [next(ranks) for _ in range(tensor)]) for each in ranges] for _ in range(copies)]
    made = plan(*(replica(*row) for row in rows))
    for framework, patterns in NUMBERS.items():
        text = plan_for(framework, made, TOPOLOGY)
        if "cannot run" in text:
            assert (framework == "deepspeed" and len(set(layers)) > 1) or "would not be consecutive" in text
            continue
        found = [re.findall(pattern, text) for pattern in patterns]
        degrees = [int(each[0]) if each else 1 for each in found[:3]]
        order, devices = places(text)
        assert degrees == [tensor, stages, made.micro_batch] and len(devices) == made.world_size
        assert degrees[0] * degrees[1] * copies == len(devices)
        given_layers = [int(each) for line in found[3] for each in line.split(", ")]
        assert given_layers == layers or (not given_layers and len(set(layers)) == 1)
        steps = re.findall(r'(?:global.batch.size:? |"train_batch_size": |gives |over )(\d+)', text)
        micro_batches = made.replicas[0].micro_batches
        own = micro_batches * (made.micro_batch if stages > 1 else 1)
        assert steps == [str(own if framework == "colossalai" else made.global_batch)]
        groups = [tuple(devices[first : first + tensor]) for first in range(0, len(devices), tensor)]
        pipelines = {
            tuple(groups[r::copies] if order == DATA_FIRST else groups[r * stages : (r + 1) * stages])
            for r in range(copies)
        }
        assert pipelines == set(made.rank_order)


def test_colossalai_has_the_arguments() -> None:
    known: dict[str, Callable[..., Any]] = {
        "HybridParallelPlugin": HybridParallelPlugin.__init__,
        "PipelineGradientCheckpointConfig": PipelineGradientCheckpointConfig,
        "PipelineGraph": PipelineGraph,
    }
    called = set()
    single = plan(replica(stage(0, 6, (0,))), zero_stage=1, precision="bf16")
    for made in (equal((4, 2), [1], zero_stage=1), two_chunks("zbv"), two_chunks("interleaved"), single):
        text = "\n".join(line for line in plan_for("colossalai", made, TOPOLOGY).splitlines() if "torchrun" not in line)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
                assert {each.arg for each in node.keywords} <= set(inspect.signature(known[node.func.id]).parameters)
    assert called == set(known)
