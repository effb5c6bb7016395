"""Adds what a cluster's links take for tensor parallelism to times that do not contain it.

Measured times contain the communication on the links that they were measured on. Estimated times contain none: the
profile then says how often each layer sums its outputs over the tensor-parallel group, as
``LayerSizes.forward_sums`` and ``backward_sums``.

A layer takes ``sums · (2 (n−1)/n · bytes/bandwidth + 2 (n−1) · latency)`` longer, for a ring of n devices inside a node
(Patarasuk and Yuan 2009), while all groups of the node do the same. If nodes with the same kind of device have other
links, the slowest of them counts.
"""

from __future__ import annotations

from ..cluster.all_reduce import synchronization_seconds
from ..cluster.topology import Topology
from .layer_profile import LayerSizes, LayerTimes, ModelProfile

__all__ = ["on_links"]


def on_links(profile: ModelProfile, topology: Topology) -> ModelProfile:
    """``profile`` with times that contain all communication of tensor parallelism on these machines; the profile itself
    if they do already."""
    sizes = {each.tensor_parallel: each for each in profile.sizes if each.forward_sums or each.backward_sums}
    if not sizes:
        return profile
    times = [
        _with_sums(each, sizes[each.tensor_parallel], topology) if each.tensor_parallel in sizes else each
        for each in profile.times
    ]
    known = [each.model_copy(update={"forward_sums": (), "backward_sums": ()}) for each in profile.sizes]
    return profile.changed(times=tuple(times), sizes=tuple(known))


def _with_sums(times: LayerTimes, sizes: LayerSizes, topology: Topology) -> LayerTimes:
    seconds = _sum_seconds(times, max(sizes.output_bytes) * times.micro_batch, topology)
    forward = zip(times.forward_seconds, sizes.forward_sums, strict=True)
    backward = zip(times.backward_seconds, sizes.backward_sums, strict=True)
    return times.model_copy(
        update={
            "forward_seconds": tuple(own + count * seconds for own, count in forward),
            "backward_seconds": tuple(own + count * seconds for own, count in backward),
        }
    )


def _sum_seconds(times: LayerTimes, sum_bytes: float, topology: Topology) -> float:
    """The time of a sum over the group, on the slowest node that has such groups; 0 if there is none."""
    degree, slowest = times.tensor_parallel, 0.0
    for node in topology.nodes:
        kinds = {topology.devices[device].kind.name for device in node.devices}
        if degree > 1 and len(node.devices) >= degree and times.device in kinds:
            groups = len(node.devices) // degree
            seconds = synchronization_seconds(topology, node.devices[:degree], sum_bytes, sharing=groups)
            slowest = max(slowest, seconds)
    return slowest
