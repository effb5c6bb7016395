"""Merge the profiles of several tensor-parallel degrees, measured one after the other on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence

from .merge_ranks import MeasuredLayers

__all__ = ["merge_degrees"]


def merge_degrees(measured: Sequence[tuple[int, MeasuredLayers]]) -> tuple[MeasuredLayers, tuple[str, ...]]:
    """One profile of all degrees.

    The kinds of devices are those of the first degree. A group of neighboring ranks has the kind of its members. A
    group with several kinds is left out, because plans have groups of one kind only.

    Args:
        measured: degrees, each with its measurement; the first is the lowest degree.

    Returns:
        The measurement, and remarks about what was left out.
    """
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
        found = [
            time.model_copy(update={"device": kind})
            for kind, name in kinds.items()
            for time in each.profile.times
            if time.device == name
        ]
        if found:
            times += found
            sizes += each.profile.sizes
    profile = first.profile.model_copy(update={"times": tuple(times), "sizes": tuple(sizes)})
    return MeasuredLayers(profile, first.devices, first.memory_bytes), tuple(remarks)


def _seconds(measured: MeasuredLayers, device: str) -> float:
    """Forward and backward of all layers on a kind of device, with the smallest micro-batch."""
    times = next(each for each in measured.profile.times if each.device == device)
    return sum(times.forward_seconds) + sum(times.backward_seconds)
