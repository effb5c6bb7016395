"""Machines with the kinds of devices that a profile has for them."""

import dataclasses

from ..cluster.all_reduce import synchronization_seconds
from ..cluster.topology import DeviceKind, Topology
from .layer_profile import LayerSizes, LayerTimes, ModelProfile


def as_profiled(topology: Topology, profile: ModelProfile) -> Topology:
    """``topology`` in which each device has the kind under which the profile measured its rank, and full speed.

    Slow devices of a profile are kinds of their own ("cpu-2") with a time for every layer, a cluster file has one
    speed. If the profile has other ranks or device names, kinds and speeds stay. The reserve of each device is at least
    what was in use beside the allocator's memory when its kind was measured.
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


# Estimated times contain no communication of tensor parallelism, measured ones do. A layer takes ``sums · (2 (n−1)/n ·
# bytes/bandwidth + 2 (n−1) · latency)`` longer, for a ring in a node (Patarasuk and Yuan 2009), while all groups of the
# node do the same. The slowest node with the same kind of device counts.


def on_links(profile: ModelProfile, topology: Topology) -> ModelProfile:
    """``profile`` whose times contain the communication of tensor parallelism on these machines, or itself."""
    sizes = {each.tensor_parallel: each for each in profile.sizes if each.forward_sums or each.backward_sums}
    if not sizes:
        return profile
    times = tuple(
        _with_sums(each, sizes[each.tensor_parallel], topology) if each.tensor_parallel in sizes else each
        for each in profile.times
    )
    known = tuple(each.model_copy(update={"forward_sums": (), "backward_sums": ()}) for each in profile.sizes)
    return profile.model_copy(update={"times": times, "sizes": known})


def _with_sums(times: LayerTimes, sizes: LayerSizes, topology: Topology) -> LayerTimes:
    """The times with those of the sums over a group, on the slowest node that has such groups."""
    degree, seconds = times.tensor_parallel, 0.0
    for node in topology.nodes:
        kinds = {topology.devices[device].kind.name for device in node.devices}
        if degree > 1 and len(node.devices) >= degree and times.device in kinds:
            group, groups = node.devices[:degree], len(node.devices) // degree
            sent = max(sizes.output_bytes) * times.micro_batch
            seconds = max(seconds, synchronization_seconds(topology, group, sent, sharing=groups))
    forward = zip(times.forward_seconds, sizes.forward_sums, strict=True)
    backward = zip(times.backward_seconds, sizes.backward_sums, strict=True)
    changes = {
        "forward_seconds": tuple(own + count * seconds for own, count in forward),
        "backward_seconds": tuple(own + count * seconds for own, count in backward),
    }
    return times.model_copy(update=changes)
