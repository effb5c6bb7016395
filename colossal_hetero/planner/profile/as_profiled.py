"""The machines with the kinds of devices that a profile has for them."""

from __future__ import annotations

import dataclasses

from ..cluster.topology import DeviceKind, Topology
from .layer_profile import ModelProfile

__all__ = ["as_profiled"]


def as_profiled(topology: Topology, profile: ModelProfile) -> Topology:
    """``topology`` in which each device has the kind under which the profile measured its rank, and full speed.

    A cluster file gives one number for the speed of a device. A profile that was measured by the same ranks has the
    times of every layer on each of them, and slow devices are kinds of their own ("cpu-2"). If the profile was measured
    by other ranks or on devices with other names, kinds and speeds are unchanged.

    The reserve of each device is at least what was in use beside the allocator's memory when its kind was measured.

    Raises:
        ValueError: A device has less memory than that.
    """
    devices = topology.devices
    measured = profile.rank_devices
    if len(measured) == len(devices) and all(
        name == device.kind.name or name.removeprefix(device.kind.name + "-").isdigit()
        for name, device in zip(measured, devices, strict=True)
    ):
        devices = tuple(
            dataclasses.replace(device, kind=dataclasses.replace(device.kind, name=name), speed=1.0)
            for name, device in zip(measured, devices, strict=True)
        )
    kinds = {kind: _with_context(kind, profile) for kind in {device.kind for device in devices}}
    devices = tuple(dataclasses.replace(device, kind=kinds[device.kind]) for device in devices)
    return dataclasses.replace(topology, devices=devices)


def _with_context(kind: DeviceKind, profile: ModelProfile) -> DeviceKind:
    context = profile.context_bytes.get(kind.name, 0)
    if context >= kind.memory_bytes:
        raise ValueError(
            f"the profile says that {context / 1e9:.3g} GB of {kind.name} are in use for its context and libraries, "
            f"but the cluster file gives it {kind.memory_bytes / 1e9:.3g} GB of memory; correct one of them"
        )
    return dataclasses.replace(kind, memory_reserve_bytes=max(kind.memory_reserve_bytes, context))
