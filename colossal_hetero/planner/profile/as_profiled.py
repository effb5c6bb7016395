"""The machines with the kinds of devices that a profile has for them."""

from __future__ import annotations

import dataclasses

from ..cluster.topology import Topology
from .layer_profile import ModelProfile

__all__ = ["as_profiled"]


def as_profiled(topology: Topology, profile: ModelProfile) -> Topology:
    """``topology`` in which each device has the kind under which the profile measured its rank, and full speed.

    A cluster file gives one number for the speed of a device. A profile that was measured by the same ranks has the
    times of every layer on each of them, and slow devices are kinds of their own ("cpu-2"). If the profile was measured
    by other ranks or on devices with other names, ``topology`` is returned unchanged.
    """
    measured = profile.rank_devices
    if len(measured) != len(topology.devices) or not all(
        name == device.kind.name or name.removeprefix(device.kind.name + "-").isdigit()
        for name, device in zip(measured, topology.devices, strict=True)
    ):
        return topology
    devices = tuple(
        dataclasses.replace(device, kind=dataclasses.replace(device.kind, name=name), speed=1.0)
        for name, device in zip(measured, topology.devices, strict=True)
    )
    return dataclasses.replace(topology, devices=devices)
