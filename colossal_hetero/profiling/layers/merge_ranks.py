"""What ranks have measured, as one profile: ranks that agree are one kind of device, others kinds of their own."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...planner.profile.layer_profile import BlockRun, LayerSizes, LayerTimes, ModelProfile

__all__ = ["MeasuredLayers", "RankLayers", "merge_ranks"]

ALIKE = 0.1
"""Ranks with the same name of device whose times differ by no more are one kind."""


@dataclass(frozen=True)
class MeasuredLayers:
    """A profile, and what is needed to describe the machines that it was measured on."""

    profile: ModelProfile
    devices: tuple[str, ...]
    """Kind of each rank, as the profile calls it."""
    memory_bytes: tuple[int, ...]
    """What each rank may use of its device."""


@dataclass
class RankLayers:
    """What one rank found; lists are ``[layers]`` of seconds or bytes, as in the profile."""

    device: str
    memory_bytes: int
    forward: dict[int, list[float]] = field(default_factory=dict)
    """By micro-batch."""
    backward: dict[int, list[float]] = field(default_factory=dict)
    runs: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)
    """By micro-batch and number of blocks: forward and backward."""
    update: list[float] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    state_factor: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all that was timed."""
        return sum(map(sum, [*self.forward.values(), *self.backward.values()]))


def merge_ranks(
    measured: Sequence[RankLayers],
    groups: Sequence[Sequence[int]],
    parameter_bytes: tuple[int, ...],
    tensor_parallel: int,
    precision: str,
    name: str,
) -> MeasuredLayers:
    """One profile of what all ranks found.

    Args:
        measured: by rank.
        groups: ranks that share layers; each by itself without tensor parallelism. A group is as slow as its slowest
            rank, and groups that are alike are one kind.
        parameter_bytes: ``[layers]``, per device.
        tensor_parallel: ranks in a group.
        precision: of the passes.
        name: of the model.
    """
    slowest = [max((measured[rank] for rank in group), key=lambda each: each.seconds) for group in groups]
    common = sorted(set.intersection(*(set(each.forward) for each in slowest)))
    kinds: list[list[int]] = []
    for index, each in enumerate(slowest):
        for kind in kinds:
            first = slowest[kind[0]]
            if first.device == each.device and _differ(first, each, common) <= ALIKE:
                kind.append(index)
                break
        else:
            kinds.append([index])
    names = _names([slowest[kind[0]].device for kind in kinds])
    times = [
        _times([slowest[index] for index in kind], own, tensor_parallel, size)
        for kind, own in zip(kinds, names, strict=True)
        for size in sorted(slowest[kind[0]].forward)
        if all(size in slowest[index].forward for index in kind)
    ]
    devices = [""] * len(measured)
    for kind, own in zip(kinds, names, strict=True):
        for index in kind:
            for rank in groups[index]:
                devices[rank] = own
    first = measured[0]
    profile = ModelProfile(
        name=name,
        precision=precision,
        state_factor=first.state_factor,
        source="measured",
        rank_devices=tuple(devices),
        times=tuple(times),
        sizes=(
            LayerSizes(
                tensor_parallel=tensor_parallel,
                parameter_bytes=parameter_bytes,
                activation_bytes=tuple(max(values) for values in zip(*(e.activations for e in measured), strict=True)),
                output_bytes=tuple(first.outputs),
            ),
        ),
    )
    return MeasuredLayers(profile, tuple(devices), tuple(each.memory_bytes for each in measured))


def _differ(one: RankLayers, other: RankLayers, sizes: Sequence[int]) -> float:
    """By how much the slower takes longer, over all micro-batches that both have run."""
    seconds = [sum(sum(each.forward[size]) + sum(each.backward[size]) for size in sizes) for each in (one, other)]
    return max(seconds) / min(seconds) - 1


def _times(measured: Sequence[RankLayers], device: str, tensor_parallel: int, size: int) -> LayerTimes:
    """The mean of ranks that are alike."""

    def mean(values: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return tuple(statistics.fmean(each) for each in zip(*values, strict=True))

    runs = {count: mean(each.runs[size][count] for each in measured) for count in measured[0].runs[size]}
    return LayerTimes(
        device=device,
        tensor_parallel=tensor_parallel,
        micro_batch=size,
        forward_seconds=mean(each.forward[size] for each in measured),
        backward_seconds=mean(each.backward[size] for each in measured),
        update_seconds=mean(each.update for each in measured),
        block_runs=tuple(
            BlockRun(blocks=count, forward_seconds=forward, backward_seconds=backward)
            for count, (forward, backward) in runs.items()
        ),
    )


def _names(devices: Sequence[str]) -> list[str]:
    """A name for each kind: "cpu", "cpu-2" …"""
    return [
        device if index == 0 else f"{device}-{index + 1}"
        for place, device in enumerate(devices)
        for index in [list(devices[:place]).count(device)]
    ]
