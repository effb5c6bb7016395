"""Clusters and layer profiles of a few numbers, for whole searches."""

import itertools

import numpy as np

from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from tests.support.layer_profiles import layer_times, small_sizes
from tests.support.machines import of_nodes

FAST_LINK, SLOW_LINK = Channel("NVLink", 300e9, 1e-5), Channel("RoCE", 25e9, 2e-5)


def cluster(*nodes: dict[str, int], memory: dict[str, int] | None = None, inside: Channel = FAST_LINK) -> Topology:
    """Nodes with these numbers of devices of each kind; a device has 100 bytes of memory unless ``memory`` differs."""
    memories = memory or {}

    def kinds(node: dict[str, int]) -> list[DeviceKind]:
        return [DeviceKind(name, memories.get(name, 100), 1e12) for name, count in node.items() for _ in range(count)]

    return of_nodes((kinds(node), inside, (SLOW_LINK,)) for node in nodes)


def profile(
    blocks: int = 6,
    seconds: dict[str, float] | None = None,
    degrees: tuple[int, ...] = (1, 2),
    micro_batches: tuple[int, ...] = (1, 2),
    seed: int = 0,
) -> ModelProfile:
    """Each block has 2 bytes of parameters and 6 of state, and keeps 4 per sample; the head takes half as long."""
    random = np.random.default_rng(seed)
    times = []
    for (name, each), degree, size in itertools.product(
        (seconds or {"fast": 1.0, "slow": 3.0}).items(), degrees, micro_batches
    ):
        work = each * (0.2 + 0.8 * size) / degree**0.8
        forward = [0.0, *(work * random.uniform(0.9, 1.1, blocks)), 0.5 * work]
        times.append(layer_times(name, forward, micro_batch=size, tensor_parallel=degree))
    sizes = small_sizes(blocks, degrees, 10**9)
    return ModelProfile(name="small", state_factor=3.0, gradient_factor=6e9, times=tuple(times), sizes=sizes)
