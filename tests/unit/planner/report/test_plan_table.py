"""A plan as text: the rows of its table, its layout on one line, the commands that run it."""

from __future__ import annotations

import ast
import io
from typing import Any

from rich.console import Console

from colossal_hetero.planner.cost.plan import Plan
from colossal_hetero.planner.cost.ranked_plan import RankedPlan
from colossal_hetero.planner.report.launch_commands import launch_lines, training_call
from colossal_hetero.planner.report.plan_table import layout, one_line, render, rows, short_ranks
from tests.unit.planner.plans.test_plan import chunked, plan, replica, stage


def printed(*candidates: RankedPlan, width: int = 140) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(render(candidates))
    return stream.getvalue()


def unequal() -> Plan:
    return plan(
        replica(stage(0, 4, (0,)), stage(4, 6, (1,), "V100-16"), micro_batches=12),
        replica(*(stage(2 * s, 2 * s + 2, (2 + s,), "T4") for s in range(3)), micro_batches=4),
    )


def large(replicas: int = 16, stages: int = 32) -> Plan:
    """``replicas × stages × 2`` devices in nodes of 8."""
    return plan(
        *(
            replica(
                *(stage(s, s + 1, (2 * (r * stages + s), 2 * (r * stages + s) + 1), "A100-80") for s in range(stages)),
                micro_batches=64,
            )
            for r in range(replicas)
        )
    )


def test_a_layout_on_one_line() -> None:
    made = plan(iteration_seconds=1.23)
    assert one_line(made) == (
        "tp 1 · dp 2 × pp [A100-40 0-3 | V100-16 4-5] · micro-batch 2 × 8 · 1.230 s (26.02 samples/s)"
    )
    single = plan(replica(stage(0, 1, (0,)), stage(1, 6, (1,), "T4")))
    assert layout(single) == "tp 1 · dp 1 × pp [A100-40 0 | T4 1-5] · micro-batch 2 × 8"
    assert layout(unequal()) == (
        "tp 1 · dp 2 = pp [A100-40 0-3 | V100-16 4-5] × 12 + pp [3 × T4 0-5] × 4 · micro-batch 2"
    )
    many = layout(plan(replica(*(stage(s, s + 1, (s,), f"kind-{s}") for s in range(40)))))
    assert "| kind-5 5 | … | kind-39 39] ·" in many
    assert layout(plan(*(replica(stage(0, 6, (r,), f"kind-{r}")) for r in range(40)))).count("kind-") == 8
    assert layout(large()) == "tp 2 · dp 16 × pp [32 × A100-80 0-31] · micro-batch 2 × 64"
    assert [short_ranks(ranks) for ranks in (range(4), [0, 1, 8, 9], [0, 1, 8, 9, 16, 17])] == [
        *("0-3", "0-1, 8-9", "0-1 … 17 (6)"),
    ]
    made = plan(replica(stage(0, 4, (0,)), stage(4, 6, (1,), recompute=True)))
    assert "A100-40 0-3 | A100-40 (recompute) 4-5" in one_line(made)
    assert [row.device for row in rows(made)] == ["A100-40", "A100-40 (recompute)"]


def test_similar_replicas_share_rows() -> None:
    first, second = rows(plan())
    assert (first.replicas, first.ranks, first.layers) == ((0, 1), [0, 2], "[0, 4)")
    assert (second.replicas, second.ranks, second.layers) == ((0, 1), [1, 3], "[4, 6)")
    assert len(rows(unequal())) == 5
    slower = [replica(stage(0, 6, (r,), forward_seconds=seconds)) for r, seconds in enumerate((1.0, 1.0001, 1.1))]
    assert [row.replicas for row in rows(plan(*slower))] == [(0, 1), (2,)]
    (row,) = rows(large())
    assert row.ranks == list(range(1024)) and row.numbers == tuple(range(32)) and row.layers == "[0, 32)"
    assert len({stage.node for stage in row.everywhere}) == 256


def test_the_next_plans_are_listed_with_reasons_and_names_are_not_markup() -> None:
    odd = plan(replica(stage(0, 6, (0,), "[bold]T4[/x]")), notes=("[red]note[/q]",))
    text = printed(RankedPlan(odd, "first [b]"), RankedPlan(plan(), "because [c]"))
    for words in ("[bold]T4[/x]", "[red]note[/q]", "because [c]", "first [b]"):
        assert words in text


def plugin_arguments(text: str) -> dict[str, Any]:
    """Keyword arguments with which Python lines of ``text`` make the plugin."""
    (line,) = (line for line in text.splitlines() if line.startswith("plugin = HeteroHybridParallelPlugin("))
    call = ast.parse(line).body[0].value  # type: ignore[attr-defined]
    return {each.arg: eval(ast.unparse(each.value)) for each in call.keywords}


def test_the_calls_that_run_a_plan() -> None:
    text = training_call(plan(precision="bf16"), "my plan.json")
    assert plugin_arguments(text) == {"plan": "my plan.json", "precision": "bf16"}
    assert "the data loader of every replica gives 16 samples per step: 8 micro-batches of 2" in text
    assert "torchrun --nproc-per-node 4 train.py" in text
    assert "train with booster.execute_pipeline(...), which divides them" in text
    text = training_call(unequal(), "u.json", overlap=True)
    expected = {"plan": "u.json", "precision": "fp32", "zero_stage": 1, "overlap_communication": True}
    assert plugin_arguments(text) == expected
    assert "gives the replicas 24, 8 samples of each step, in micro-batches of 2" in text


def test_the_chunks_of_stages_are_shown() -> None:
    made = chunked("interleaved")
    assert "[A100-40 0-1 + 3-4 | A100-40 2 + 5] · micro-batch 2 × 8 · interleaved" in one_line(made)
    assert [row.layers for row in rows(made)] == ["[0, 2), [3, 5)", "[2, 3), [5, 6)"]
    assert "[0, 2), [3, 5)" in printed(RankedPlan(made, ""))
    text = training_call(chunked("zbv"))
    assert "the first stage has the loss" in text


def test_the_text_says_why_a_plan_cannot_be_run() -> None:
    few = training_call(plan(replica(stage(0, 4, (0,)), stage(4, 6, (1,)), micro_batches=1)), "few.json")
    assert "It cannot be run:" in few and "colossal-hetero simulate few.json" in few
    assert "1 micro-batch for 2 stages" in few and "smaller micro-batches or a larger global batch" in few
    assert "Plugin(" not in few and all(line.startswith("#") for line in few.splitlines())


def test_every_node_has_a_command_with_its_number_of_ranks() -> None:
    assert launch_lines(on_nodes(("a", 2), ("b", 2), ("c", 1))) == [
        "torchrun --nnodes 3 --node-rank 0 --nproc-per-node 2 --master-addr a train.py  # on a",
        "torchrun --nnodes 3 --node-rank 1 --nproc-per-node 2 --master-addr a train.py  # on b",
        "torchrun --nnodes 3 --node-rank 2 --nproc-per-node 1 --master-addr a train.py  # on c",
    ]
    assert launch_lines(on_nodes(("only", 2))) == ["torchrun --nproc-per-node 2 train.py"]
    many = [(f"a{index}", 2) for index in range(9)]
    assert launch_lines(on_nodes(*many, ("b", 1))) == [
        "torchrun --nnodes 10 --node-rank $N --nproc-per-node 2 --master-addr a0 train.py  # on a0, …, a8: N = 0, …, 8",
        "torchrun --nnodes 10 --node-rank 9 --nproc-per-node 1 --master-addr a0 train.py  # on b",
    ]
    line, command = launch_lines(plan(replica(stage(0, 3, (4,)), stage(3, 6, (6,)))))
    assert line.startswith("# only the cluster's devices 4, 6 are used") and "as ranks 0-1" in line
    assert command == "torchrun --nproc-per-node 2 train.py"


def on_nodes(*nodes: tuple[str, int]) -> Plan:
    """A plan on these nodes with one stage per rank."""
    names = [name for name, ranks in nodes for _ in range(ranks)]
    return plan(replica(*(stage(rank, rank + 1, (rank,), node=name) for rank, name in enumerate(names))))
