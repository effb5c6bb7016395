"""Merge the measurements of all ranks into one profile: ranks with similar times become one kind of device."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile
from .layer_memory import split_temporaries

ALIKE = 0.1  # ranks with the same device name whose times differ by at most this share are one kind


@dataclass(frozen=True)
class MeasuredLayers:
    """A profile, and kind and usable memory of each rank's device, by rank."""

    profile: ModelProfile
    devices: tuple[str, ...]
    memory_bytes: tuple[int, ...]


@dataclass
class RankLayers:
    """Measurements of one rank: lists are ``[layers]``, dictionaries by micro-batch, times in seconds."""

    device: str
    memory_bytes: int
    forward: dict[int, list[float]] = field(default_factory=dict)
    backward: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    update: list[float] = field(default_factory=list)
    activations: list[int] = field(default_factory=list)  # bytes per sample kept for backward
    outputs: list[int] = field(default_factory=list)  # bytes per sample of the output
    temporaries: dict[int, list[int]] = field(default_factory=dict)  # needed for a moment; empty if not measured
    context_bytes: int | None = None  # bytes of the device in use beside those of the allocator; None if not measured
    state_factor: float = 0.0  # bytes of parameters, gradients and optimizer state per byte of parameters

    @property
    def seconds(self) -> float:
        return sum(map(sum, [*self.forward.values(), *self.backward.values()]))


def merge_ranks(
    measured: Sequence[RankLayers],
    groups: Sequence[Sequence[int]],
    parameter_bytes: tuple[int, ...],
    tensor_parallel: int,
    precision: str,
    name: str,
) -> MeasuredLayers:
    """Merge all ranks' measurements into a profile of ``parameter_bytes`` per device, ``[layers]``. ``groups`` of
    ``tensor_parallel`` ranks share layers. A group has the times of its slowest rank; similar groups are one kind."""
    slowest = [max((measured[rank] for rank in group), key=lambda each: each.seconds) for group in groups]
    common = sorted(set.intersection(*(set(each.forward) for each in slowest)))
    kinds: dict[str, list[RankLayers]] = {}
    devices = [""] * len(measured)
    for group, each in zip(groups, slowest, strict=True):
        device, number = each.device, 1
        while device in kinds and _differ(kinds[device][0], each, common) > ALIKE:
            number += 1
            device = f"{each.device}-{number}"
        kinds.setdefault(device, []).append(each)
        for rank in group:
            devices[rank] = device
    times = [
        _times(kind, device, tensor_parallel, size)
        for device, kind in kinds.items()
        for size in sorted(set.intersection(*(set(each.forward) for each in kind)))
    ]
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
                **_temporaries(measured),
            ),
        ),
        context_bytes=_context_bytes(measured, devices),
    )
    return MeasuredLayers(profile, tuple(devices), tuple(each.memory_bytes for each in measured))


def _temporaries(measured: Sequence[RankLayers]) -> dict[str, tuple[int, ...]]:
    common = set.intersection(*(set(each.temporaries) for each in measured))
    if not common:
        return {}
    rows = {size: zip(*(each.temporaries[size] for each in measured), strict=True) for size in common}
    per_sample, fixed = split_temporaries({size: list(map(max, of_layers)) for size, of_layers in rows.items()})
    return {"temporary_bytes": per_sample, "fixed_temporary_bytes": fixed}


def _context_bytes(measured: Sequence[RankLayers], devices: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each, device in zip(measured, devices, strict=True):
        if each.context_bytes is not None:
            found[device] = max(found.get(device, 0), each.context_bytes)
    return found


def _differ(one: RankLayers, other: RankLayers, sizes: Sequence[int]) -> float:
    seconds = [sum(sum(each.forward[size]) + sum(each.backward[size]) for size in sizes) for each in (one, other)]
    return max(seconds) / min(seconds) - 1


def _times(measured: Sequence[RankLayers], device: str, tensor_parallel: int, size: int) -> LayerTimes:
    def mean(values: Iterable[Sequence[float]]) -> tuple[float, ...]:
        return tuple(statistics.fmean(each) for each in zip(*values, strict=True))

    return LayerTimes(
        device=device,
        tensor_parallel=tensor_parallel,
        micro_batch=size,
        forward_seconds=mean(each.forward[size] for each in measured),
        backward_seconds=mean(each.backward[size] for each in measured),
        update_seconds=mean(each.update for each in measured),
        relative_error=max(each.errors.get(size, 0.0) for each in measured),
    )


def merge_degrees(measured: Sequence[tuple[int, MeasuredLayers]]) -> tuple[MeasuredLayers, tuple[str, ...]]:
    """Merge profiles of several degrees into one, with the kinds of devices of the first one; returns it and remarks.
    Groups of several kinds are left out, because plans have groups of one kind only."""
    _, first = measured[0]
    times = list(first.profile.times)
    sizes = list(first.profile.sizes)
    remarks = []
    for degree, each in measured[1:]:
        kinds: dict[str, str] = {}
        seconds = {name: _seconds(each, name) for name in each.profile.devices}
        mixed = []
        for start in range(0, len(first.devices), degree):
            members = sorted(set(first.devices[start : start + degree]))
            if len(members) > 1:
                mixed.append(f"ranks {start} to {start + degree - 1} are {' and '.join(members)}")
                continue
            # Of several groups of one kind the slowest counts.
            (kind,), name = members, each.devices[start]
            kinds[kind] = max(kinds.get(kind, name), name, key=seconds.__getitem__)
        if mixed:
            remarks.append(f"tensor parallel {degree}: groups of unequal devices are left out: {'; '.join(mixed)}")
        for kind, name in kinds.items():
            times += [time.model_copy(update={"device": kind}) for time in each.profile.times if time.device == name]
        sizes += each.profile.sizes if kinds else ()
    profile = first.profile.model_copy(update={"times": tuple(times), "sizes": tuple(sizes)})
    return MeasuredLayers(profile, first.devices, first.memory_bytes), tuple(remarks)


def _seconds(measured: MeasuredLayers, device: str) -> float:
    times = next(each for each in measured.profile.times if each.device == device)
    return sum(times.forward_seconds) + sum(times.backward_seconds)
