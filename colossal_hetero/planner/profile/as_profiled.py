"""The machines with their devices called as a profile calls them."""

from __future__ import annotations

import dataclasses

from ..cluster.topology import Topology
from .layer_profile import ModelProfile

__all__ = ["as_profiled"]


def as_profiled(topology: Topology, profile: ModelProfile) -> Topology:
    """``topology`` with each rank's device of the kind as which the profile measured that rank.

    A cluster file says how fast a device is by one number, a profile that was taken by the same ranks knows every
    layer's time on each of them: there slow devices are kinds of their own ("cpu-2"). If the profile was taken
    elsewhere, by other ranks or on devices of other names, the topology is returned as it is.
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
