"""AutoHet's clusters, and GPT-3 6.7B with layer times estimated from nominal FLOP/s.

Nodes have eight A100, H800 or H20, with NVLink inside and 400 Gb/s between nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colossal_hetero.planner.cluster.gpu_catalog import GPUS
from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile

NAMES = ("A100-80", "H800", "H20")
CLUSTERS = {
    16: (8, 4, 4),
    24: (8, 8, 8),
    32: (16, 8, 8),
    64: (24, 24, 16),
    256: (88, 88, 80),
    1024: (344, 344, 336),
    4096: (1368, 1368, 1360),
}
"""By total number of GPUs: the number of each kind in ``NAMES``."""
NVLINK, ROCE = Channel("NVLink", 300e9, 1e-5), Channel("RoCE", 50e9, 2e-5)
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 32, 4096, 2048, 50257
"""Sizes of GPT-3 6.7B."""
DEGREES, SIZES = (1, 2, 4, 8), (1, 2, 4, 8)
REACHED = 0.45
"""Share of the nominal FLOP/s that layers reach, for all kinds; tensor parallelism and small micro-batches lower it."""


def cluster(counts: Sequence[int]) -> Topology:
    """A cluster of nodes of up to eight GPUs, with ``counts`` GPUs of the kinds in ``NAMES``."""
    devices: list[Device] = []
    nodes = []
    for name, count in zip(NAMES, counts, strict=True):
        for start in range(0, count, 8):
            first, number = len(devices), min(8, count - start)
            devices += [Device(GPUS[name], len(nodes), 0)] * number
            nodes.append(Node(f"{name}-{start // 8}", 0, tuple(range(first, first + number)), NVLINK, (ROCE,)))
    return Topology(tuple(devices), tuple(nodes), ("cluster",))


def gpt() -> ModelProfile:
    """Profile of GPT-3 6.7B with layer times from FLOP (Holmes, Eq. 6, by layer).

    Mixed precision with Adam takes 16 bytes per parameter.
    """
    block = 24 * SEQUENCE * HIDDEN**2 * (1 + SEQUENCE / (6 * HIDDEN))
    head = 2 * SEQUENCE * HIDDEN * VOCABULARY
    times, sizes = [], []
    for degree in DEGREES:
        for name in NAMES:
            for size in SIZES:
                reached = REACHED * (1 - 0.06 * np.log2(degree)) * (0.85 + 0.05 * np.log2(size))
                flop = np.array([0.01 * block, *[block] * LAYERS, head])
                seconds = flop * size / degree / (GPUS[name].flops * reached)
                times.append(
                    LayerTimes(
                        device=name,
                        tensor_parallel=degree,
                        micro_batch=size,
                        forward_seconds=tuple(seconds),
                        backward_seconds=tuple(2 * seconds),
                        update_seconds=(5e-4 / degree,) * (LAYERS + 2),
                    )
                )
        embedding, parameters = 2 * VOCABULARY * HIDDEN // degree, 24 * HIDDEN**2 // degree
        residual = 2 * SEQUENCE * HIDDEN
        sizes.append(
            LayerSizes(
                tensor_parallel=degree,
                parameter_bytes=(embedding, *[parameters] * LAYERS, embedding),
                activation_bytes=(residual, *[17 * residual // degree] * LAYERS, residual),
                output_bytes=(residual,) * (LAYERS + 2),
            )
        )
    return ModelProfile(name="GPT-3 6.7B", precision="bf16", state_factor=8.0, times=tuple(times), sizes=tuple(sizes))
