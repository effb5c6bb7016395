"""Plans of a small model, made by hand."""

from collections.abc import Sequence
from typing import Any

from colossal_hetero.planner.cost.pass_order import GraphSeconds
from colossal_hetero.planner.cost.plan import ChunkPlan, Plan, Replica, StagePlan

GIB = 2**30
GRAPH = GraphSeconds(forward=0.01, input_gradient=0.01, weight_gradient=0.01, transfer=0.0)
RANGES = {"interleaved": ([(0, 2), (3, 5)], [(2, 3), (5, 6)]), "zbv": ([(0, 2), (5, 6)], [(2, 3), (3, 5)])}


def stage(start: int, stop: int, ranks: Sequence[int], device: str = "A100-40", **changes: Any) -> StagePlan:
    values: dict[str, Any] = {
        "blocks": (start, stop),
        "device": device,
        "ranks": tuple(ranks),
        "node": f"node-{ranks[0] // 4}",
        "forward_seconds": 0.01 * (stop - start),
        "backward_seconds": 0.02 * (stop - start),
        "transfer_seconds": 0.002,
        "update_seconds": 0.001,
        "memory_bytes": 10 * GIB,
        "memory_available_bytes": 40 * GIB,
    }
    return StagePlan(**{**values, **changes})


def replica(*stages: StagePlan, micro_batches: int = 8) -> Replica:
    each = [s.forward_seconds + s.backward_seconds + s.transfer_seconds for s in stages]
    seconds = sum(each) + (micro_batches - 1) * max(each) + max(s.update_seconds for s in stages)
    return Replica(stages=stages, micro_batches=micro_batches, pipeline_seconds=seconds)


def plan(*replicas: Replica, **changes: Any) -> Plan:
    """By default two replicas of [0, 4) on an A100 and [4, 6) on a V100."""
    replicas = replicas or tuple(
        replica(stage(0, 4, (2 * r,)), stage(4, 6, (2 * r + 1,), "V100-16", memory_available_bytes=16 * GIB))
        for r in range(2)
    )
    synchronization = 0.05 if len(replicas) > 1 else 0.0
    values: dict[str, Any] = {
        "model": "net",
        "blocks": replicas[0].stages[-1].blocks[1],
        "method": "exact",
        "tensor_parallel": len(replicas[0].stages[0].ranks),
        "micro_batch": 2,
        "global_batch": 2 * sum(r.micro_batches for r in replicas),
        "replicas": replicas,
        "synchronization_seconds": synchronization,
        "iteration_seconds": max(r.pipeline_seconds for r in replicas) + synchronization,
    }
    return Plan(**{**values, **changes})


def chunked_stage(rank: int, ranges: list[tuple[int, int]]) -> StagePlan:
    chunks = tuple(
        ChunkPlan(blocks=(a, b), forward_seconds=0.01 * (b - a), backward_seconds=0.02 * (b - a), hop_seconds=0.002)
        for a, b in ranges
    )
    made = stage(0, 1, (rank,), chunks=chunks)
    return StagePlan(**{name: getattr(made, name) for name in made.model_fields_set - {"blocks"}})


def chunked(schedule: str = "interleaved", micro_batches: int = 8) -> Plan:
    stages = [chunked_stage(rank, ranges) for rank, ranges in enumerate(RANGES[schedule])]
    return plan(
        replica(*stages, micro_batches=micro_batches),
        blocks=6,
        schedule=schedule,
        order_seconds=GRAPH if schedule == "zbv" else None,
    )


def unequal() -> Plan:
    return plan(
        replica(stage(0, 4, (0,)), stage(4, 6, (1,), "V100-16"), micro_batches=12),
        replica(*(stage(2 * s, 2 * s + 2, (2 + s,), "T4") for s in range(3)), micro_batches=4),
    )
