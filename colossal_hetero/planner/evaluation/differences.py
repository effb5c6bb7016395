"""What two plans have in common and how they differ, in words."""

from __future__ import annotations

from collections import Counter

from ...io.text import count, duration
from ..layout_line.plan_layout import PlanLayout, layout_of
from ..plans.plan import Plan

__all__ = ["devices_in_words", "differences", "time_parts"]


def differences(one: Plan, other: Plan) -> list[str]:
    """How ``other`` differs from ``one``, the causes of its time first; empty if only ranks differ.

    Each is written "what: of one → of other".
    """
    values = zip(time_parts(one).items(), time_parts(other).values(), strict=True)
    found = [f"{name}: {duration(a)} → {duration(b)}" for (name, a), b in values if abs(a - b) > 0.005 * max(a, b)]
    before, after = _parts(one), _parts(other)
    found += [f"{name}: {before[name]} → {after[name]}" for name in before if before[name] != after[name]]
    return found


def time_parts(plan: Plan) -> dict[str, float]:
    """Parts of the time of an iteration, by the closed form, in seconds."""
    slowest = max(plan.replicas, key=lambda replica: replica.pipeline_seconds)
    longest = max(slowest.stages, key=lambda stage: stage.micro_batch_seconds)
    return {
        "longest stage, in all": slowest.micro_batches * longest.micro_batch_seconds,
        "filling and emptying the pipeline": slowest.pipeline_seconds
        - slowest.micro_batches * longest.micro_batch_seconds,
        "sums of gradients": plan.synchronization_seconds,
    }


def _parts(plan: Plan) -> dict[str, str]:
    """What the plan consists of, by name."""
    layout = layout_of(plan)
    stages = [stage for pipeline in layout.pipelines for stage in pipeline.stages]
    counts = sorted({replica.micro_batches for replica in plan.replicas})
    lengths = sorted({len(replica.stages) for replica in plan.replicas})
    return {
        "schedule": plan.schedule,
        "tensor-parallel degree": _range(sorted({stage.tensor_parallel for stage in stages})),
        "replicas": count(len(plan.replicas), "replica"),
        "stages of a replica": _range(lengths),
        "stages that recompute": str(sum(stage.recompute for stage in stages)),
        "ZeRO stage": str(plan.zero_stage),
        "samples of a micro-batch": str(plan.micro_batch),
        "micro-batches of a replica": _range(counts),
        "devices": devices_in_words(plan),
        "share of the blocks": _shares(layout),
    }


def _range(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def devices_in_words(plan: Plan) -> str:
    """The devices that the plan uses: ``4 × A100-40 + 8 × V100-16``."""
    devices: Counter[str] = Counter()
    for replica in plan.replicas:
        for stage in replica.stages:
            devices[stage.device] += len(stage.ranks)
    return " + ".join(f"{number} × {device}" for device, number in sorted(devices.items()))


def _shares(layout: PlanLayout) -> str:
    """The share of all blocks of all replicas that each kind of device has."""
    blocks: Counter[str] = Counter()
    for pipeline in layout.pipelines:
        for stage in pipeline.stages:
            blocks[stage.device] += sum(stage.blocks_per_chunk)
    return ", ".join(f"{number / blocks.total():.0%} on {device}" for device, number in sorted(blocks.items()))
