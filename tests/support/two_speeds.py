"""A layer profile of fast devices and of slow ones that take three times as long, and their machines."""

from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from tests.support.layer_profiles import layer_times
from tests.support.machines import of_nodes

MB = 10**6


def profile(blocks: int = 6, **changes) -> ModelProfile:
    """Layers on "fast" devices, and on "slow" devices that take three times as long, with tensor-parallel degrees 1 and
    2 and micro-batches of 1 and 2."""
    layers = blocks + 2

    sizes = tuple(
        LayerSizes(
            tensor_parallel=degree,
            parameter_bytes=(8 * MB // degree,) * layers,
            activation_bytes=(MB,) * layers,
            output_bytes=(MB,) * layers,
        )
        for degree in (1, 2)
    )
    rows = [
        layer_times(device, (seconds * micro_batch / degree,) * layers, micro_batch=micro_batch, tensor_parallel=degree)
        for device, seconds in (("fast", 0.01), ("slow", 0.03))
        for degree in (1, 2)
        for micro_batch in (1, 2)
    ]
    return ModelProfile(name="model", times=tuple(rows), sizes=sizes, **changes)


def machines(*kinds: str, devices_per_node: int = 2, memory: int = 10**10, bandwidth: float = 1e9) -> Topology:
    """One cluster; each name is a node with devices of this kind."""
    made = ([DeviceKind(name, memory, 1e12)] * devices_per_node for name in kinds)
    return of_nodes((each, Channel("NVLink", 1e11), (Channel("Ethernet", bandwidth),)) for each in made)
