"""Random clusters and models."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from colossal_hetero.planner.solver.problem import Problem as SearchProblem
from tests.support.layer_profiles import layer_times, small_sizes

__all__ = [
    *("Problem", "large_problem", "like_nodes_problem", "random_model", "small_problem"),
    *("two_nodes_problem", "whole_space_problem"),
]

KINDS = ("A", "B", "C")


class Problem(NamedTuple):
    """What a plan is made for."""

    topology: Topology
    profile: ModelProfile
    global_batch: int

    def to_search(self, **wishes: Any) -> SearchProblem:
        """With these wishes; without recomputation and ZeRO if none says else."""
        topology, profile, global_batch = self
        simple = {"recompute": False, "zero_stages": (0,)}
        return SearchProblem(topology=topology, profile=profile, global_batch=global_batch, **(simple | wishes))


def small_problem(seed: int) -> Problem:
    """1 to 4 devices, mostly alone in their nodes, and a model of up to 6 blocks without tensor parallelism."""
    random = np.random.default_rng(seed)
    profile = random_model(random)
    return Problem(random_cluster(random), profile, int(random.choice([2, 4, 6, 8, 12])))


def large_problem(seed: int) -> Problem:
    """1 to 16 devices and a model of up to 12 blocks; every third model has times for tensor parallelism."""
    random = np.random.default_rng([1, seed])
    profile = random_model(random, (1, 2) if seed % 3 == 0 else (1,), 12)
    return Problem(random_cluster(random, 16), profile, int(random.choice([8, 16, 24, 32])))


def whole_space_problem(seed: int) -> Problem:
    """1 to 4 devices, often several in a node, and a model of 2 to 4 blocks with times for tensor parallelism.

    Memory is scarce in most problems, and activations are larger than what blocks send.
    """
    random = np.random.default_rng([3, seed])
    profile = random_model(random, (1, 2), 4, (1, 2, 4) if random.random() < 0.5 else (1, 2))
    output, temporary = (float(each) for each in (random.choice([1e7, 1e8, 1e9]), random.choice([0.0, 1e9])))
    activation = float(random.choice([1e9, 4e9]))
    sizes = tuple(
        each.model_copy(
            update={
                "parameter_bytes": tuple(1e9 * size for size in each.parameter_bytes),
                "activation_bytes": tuple(activation * size for size in each.activation_bytes),
                "output_bytes": tuple(output for _ in each.output_bytes),
                "temporary_bytes": tuple(temporary for _ in each.temporary_bytes),
            }
        )
        for each in profile.sizes
    )
    changes = {"sizes": sizes, "gradient_factor": float(random.choice([0.01, 0.1, 1.0])), "state_factor": 4.0}
    topology = random_cluster(random)
    scarce = float(random.choice([0.3, 0.6, 1.0, 1.5]))
    devices = tuple(
        dataclasses.replace(
            device, kind=dataclasses.replace(device.kind, memory_bytes=int(scarce * 1e9 * device.kind.memory_bytes))
        )
        for device in topology.devices
    )
    topology = dataclasses.replace(topology, devices=devices)
    return Problem(topology, profile.model_copy(update=changes), int(random.choice([4, 8, 12])))


def like_nodes_problem(seed: int) -> Problem:
    """2 to 4 nodes of 2 or 4 equal devices, of up to three kinds, and a model with times for tensor parallelism."""
    random = np.random.default_rng([4, seed])
    profile = random_model(random, (1, 2), 8)
    size, number = int(random.choice([2, 4])), int(random.integers(2, 5))
    kinds = [DeviceKind(name, int(random.choice([100, 60, 30])), 1e12) for name in KINDS]
    inside, rate = Channel("NVLink", 3e11, 1e-5), float(random.choice([1e9, 1e10, 5e10]))
    chosen = sorted(random.integers(0, 3, number).tolist())
    devices = tuple(Device(kinds[kind], node, 0) for node, kind in enumerate(chosen) for _ in range(size))
    nodes = tuple(
        Node(f"n{node}", 0, tuple(range(node * size, (node + 1) * size)), inside, (Channel("RoCE", rate, 2e-5),))
        for node in range(number)
    )
    return Problem(Topology(devices, nodes, ("here",)), profile, int(random.choice([8, 12, 16])))


def two_nodes_problem(seed: int) -> Problem:
    """Two nodes of two like devices each, large gradients, and blocks of which some send much and others little.

    Mostly no device holds the whole model, so pipelines leave their nodes together.
    """
    random = np.random.default_rng([5, seed])
    profile = random_model(random, max_blocks=3)
    outputs = random.choice([1e8, 5e8, 1e9], len(profile.sizes[0].output_bytes)).tolist()
    sizes = tuple(each.model_copy(update={"output_bytes": tuple(outputs)}) for each in profile.sizes)
    profile = profile.model_copy(update={"sizes": sizes, "gradient_factor": 6 * float(random.choice([1e8, 1e9]))})
    inside, rates = Channel("NVLink", 3e11, 1e-5), random.choice([1e9, 1e10, 5e10], 2).tolist()
    kinds = [DeviceKind(name, int(random.choice([60, 32, 24, 16])), 1e12) for name in KINDS]
    chosen = sorted(random.integers(0, 3, 2).tolist())
    devices = tuple(Device(kinds[kind], node, 0) for node, kind in enumerate(chosen) for _ in range(2))
    nodes = tuple(
        Node(f"n{node}", 0, (2 * node, 2 * node + 1), inside, (Channel("RoCE", rate, 2e-5),))
        for node, rate in enumerate(rates)
    )
    return Problem(Topology(devices, nodes, ("here",)), profile, int(random.choice([4, 8, 12])))


def random_model(
    random: np.random.Generator,
    degrees: tuple[int, ...] = (1,),
    max_blocks: int = 6,
    micro_batches: tuple[int, ...] = (1, 2),
) -> ModelProfile:
    """2 to ``max_blocks`` blocks, timed on :data:`KINDS`: each has 2 bytes of parameters, 6 of state, and 4 bytes of
    activations per sample."""
    blocks = int(random.integers(2, max_blocks + 1))
    weight = random.uniform(0.5, 1.5, blocks) if random.random() < 0.5 else np.ones(blocks)
    head, update = random.choice([0.0, 0.5]), random.choice([0.0, 0.2])
    fixed = random.choice([0.0, 0.3])
    speeds = {"A": 1.0, "B": random.choice([1.05, 1.5, 3.0]), "C": random.choice([0.5, 1.2, 4.0])}
    times = []
    for (name, each), degree, size in itertools.product(speeds.items(), degrees, micro_batches):
        work = each * (fixed + (1 - fixed) * size) / degree**0.8
        forward = (0.0, *(work * weight), head * work)
        updates = (0.0, *(update * each * weight), 0.0)
        times.append(layer_times(name, forward, micro_batch=size, tensor_parallel=degree, update_seconds=updates))
    sizes = small_sizes(blocks, degrees, int(random.choice([1e7, 1e9, 4e9])))
    return ModelProfile(
        name="random",
        state_factor=3.0,
        gradient_factor=6 * float(random.choice([1e6, 1e8, 1e9])),
        times=tuple(times),
        sizes=sizes,
    )


def random_cluster(random: np.random.Generator, max_devices: int = 4, max_memory: int = 100) -> Topology:
    """1 to ``max_devices`` devices of up to three kinds in nodes with different networks; some devices are slower."""
    few = random.random() < 0.3
    wanted = int(random.integers(1, max_devices + 1)) if few else max_devices
    kinds = [
        DeviceKind(name, int(random.choice([max_memory, max_memory, 60, 40, 24])), 1e12)
        for name in KINDS[: int(random.integers(1, 4))]
    ]
    networks = [
        (Channel("Ethernet", rate, 1e-4), *((Channel("RoCE", 2.5e10, 2e-5),) if random.random() < 0.3 else ()))
        for rate in random.choice([1e8, 1e9, 4e9, 1.25e10], 3)
    ]
    lone = random.random() < 0.6
    devices: list[Device] = []
    nodes: list[Node] = []
    while len(devices) < wanted:
        here = 1 if lone else min(int(random.integers(1, 5)), wanted - len(devices))
        kind = kinds[int(random.integers(len(kinds)))]
        first = len(devices)
        for _ in range(here):
            if random.random() < 0.1:
                kind = kinds[int(random.integers(len(kinds)))]
            speed = float(random.choice([0.95, 0.8, 0.5])) if random.random() < 0.3 else 1.0
            devices.append(Device(kind, len(nodes), 0, speed))
        inside = Channel("NVLink", 3e11, 1e-5) if random.random() < 0.5 else Channel("PCIe", 1e10, 5e-5)
        nics = networks[int(random.integers(3))]
        nodes.append(Node(f"n{len(nodes)}", 0, tuple(range(first, len(devices))), inside, nics))
    return Topology(tuple(devices), tuple(nodes), ("here",))
