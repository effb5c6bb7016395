"""Layer times and bandwidths of real GPUs, from the tables that the authors of Sailor published (SOSP 2025).

The tables are ``layer_times.csv``, ``layer_memory.csv`` and ``bandwidth.csv``. How to read them follows from their
values and from the public code that made them (github.com/eth-easl/sailor, MIT):

- Training is in single precision. Parameters, logits and activations between layers have four bytes: OPT-350's head has
  412,090,372 bytes of output, which is 2048 × 50304 logits and the loss. Matrix products run in TF32 on GPUs that have
  it: an A100 reaches 27 TFLOP/s on OPT-350's layers, but without tensor cores its peak is 19.5 TFLOP/s. Therefore
  parameters, gradients and Adam's two moments take four times the bytes of the parameters (``state_factor``), and
  replicas reduce gradients of as many bytes as the parameters.
- ``update_seconds`` is the optimizer's step of the whole model that was timed, which had an embedding, two blocks and a
  head; the table repeats the value for each layer. Adam reads four arrays and writes three. For the parameters of those
  four layers this amounts to 0.75 TB/s on V100-16 and 1.24 TB/s on A100-40, where memory has 0.9 and 1.6 TB/s; it is
  the same for both models and all degrees except the smallest slices. Therefore the step is divided among the layers in
  proportion to their parameters here. A value of 0 means that the step was not timed.
- A bandwidth is the sum over all GPUs that send at once (for ``inside a node``: over all pairs), as a function of the
  size of the message that each of them sends.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile

SOURCE = "timed by the authors of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich)"
FILLED = 1.05
"""A single GPU fills the network card of its node if all its GPUs together send at most so many times as fast."""
STATE_FACTOR = 6.0
"""24 bytes of state per parameter, as Sailor counts for Megatron-DeepSpeed: parameters, gradients, their sum over
micro-batches, the optimizer's copy of the parameters and two moments, in single precision."""
BLOCKS_TIMED = 2
"""Number of blocks of the model whose step was timed. The rows of the other blocks repeat the second block's."""
TIMES = ("forward_seconds", "backward_seconds", "update_seconds")
SIZES = ("parameter_bytes", "activation_bytes", "output_bytes")

Row = Mapping[str, str]


@dataclass(frozen=True)
class GpuChannels:
    """Bandwidths between GPUs of one kind, by the number of a node's GPUs that send at once.

    Each bandwidth is the sum over these GPUs, as a function of the bytes that each of them sends: each of n GPUs gets
    one n-th of it.
    """

    inside: Mapping[int, Channel]
    """Inside a node, by the number of GPUs: 2, 4, 8, which make half as many pairs."""
    between: Mapping[int, Channel]
    """Between two nodes, by the number of GPUs that each send to a GPU of the other node: 1, 2, 4, 8."""


@dataclass(frozen=True)
class GpuTables:
    """What the tables contain about one model."""

    profile: ModelProfile
    left_out: tuple[str, ...]
    """Notes on rows that were not used because they cannot belong to this model, and on GPUs whose optimizer step was
    not timed."""


def read_gpu_tables(folder: Path, model: str) -> GpuTables:
    """The measured profile of ``model``, with devices named as in ``planner/cluster/gpu_catalog.py``.

    If the rows of a GPU have another number of layers than the model, they are left out: the published rows of
    GPT-Neo-2.7 on GH-96 have the 26 layers of OPT-350 and exactly its times.
    """
    sizes = {
        degree: LayerSizes(
            tensor_parallel=degree, **{name: tuple(int(float(row[name])) for row in rows) for name in SIZES}
        )
        for (degree,), rows in sorted(_layers(folder / "layer_memory.csv", model, ("tensor_parallel",)).items())
    }
    parameters = next(iter(sizes.values())).parameter_bytes
    layers = len(parameters)
    # All blocks have the same number of parameters.
    before, after = 1, next(count for count, each in enumerate(reversed(parameters)) if each == parameters[1])
    times, left_out = [], {}
    keys = ("gpu", "tensor_parallel", "micro_batch")
    for (gpu, degree, micro_batch), rows in sorted(_layers(folder / "layer_times.csv", model, keys).items()):
        if len(rows) != layers:
            left_out[gpu] = (
                f"{gpu}: its rows have {len(rows)} layers, but {model} has {layers}; they belong to another model"
            )
            continue
        if degree not in sizes:
            left_out[gpu] = f"{gpu} at tensor_parallel {degree}: there are no sizes"
            continue
        seconds: dict[str, Any] = {name: tuple(float(row[name]) for row in rows) for name in TIMES}
        if not any(seconds["update_seconds"]):
            left_out.setdefault(gpu, f"{gpu}: the optimizer's step was not timed; it is taken as 0")
        seconds["update_seconds"] = _divide_step(
            seconds["update_seconds"][0], sizes[degree].parameter_bytes, before, after
        )
        times.append(LayerTimes(device=gpu, tensor_parallel=degree, micro_batch=micro_batch, **seconds))
    profile = ModelProfile(
        name=model,
        precision="fp32",
        state_factor=STATE_FACTOR,
        master_copies=True,
        before=before,
        after=after,
        source=f"{SOURCE}: layer by layer, fp32 with TF32 products",
        times=tuple(times),
        sizes=tuple(sizes.values()),
    )
    return GpuTables(profile, tuple(left_out[gpu] for gpu in sorted(left_out)))


def import_bandwidths(folder: Path) -> dict[str, GpuChannels]:
    """The measured bandwidths by kind of GPU.

    All channels between nodes are of the kind "Ethernet", so that nodes of different GPUs can be combined.
    """
    found: dict[str, dict[str, dict[int, Channel]]] = defaultdict(lambda: {"inside a node": {}, "between nodes": {}})
    for row in _rows(folder / "bandwidth.csv"):
        gpu, where = row["gpu"], row["where"]
        kind = "Ethernet" if where == "between nodes" else INSIDE[gpu].kind if gpu in INSIDE else "PCIe"
        curve = (float(row["a"]), float(row["b"]), float(row["c"]))
        found[gpu][where][int(row["gpus"])] = Channel(kind, float(row["max_bytes_per_second"]), curve=curve)
    return {gpu: GpuChannels(places["inside a node"], places["between nodes"]) for gpu, places in found.items()}


def make_topology(channels: Mapping[str, GpuChannels], nodes: Sequence[tuple[str, int, int]]) -> Topology:
    """A topology of nodes in one network, with the measured bandwidths.

    A node's NICs together have the bandwidth that was measured for as many sending GPUs as the node has, and none has
    more than that of a single sending GPU, so that a message that is alone does not get more than was measured. All its
    devices reach each other at the lowest bandwidth measured inside a node, although some pairs have more.

    Args:
        channels: Bandwidths by kind of GPU.
        nodes: For each kind of GPU: its name, the number of nodes, the number of GPUs per node.
    """
    devices: list[Device] = []
    made: list[Node] = []
    for kind, count, size in nodes:
        inside = min(channels[kind].inside.values(), key=lambda channel: channel.bytes_per_second)
        between = channels[kind].between
        together = between[max((each for each in between if each <= size), default=min(between))]
        nics = _network_cards(between[min(between)], together, size)
        for number in range(count):
            ranks = tuple(range(len(devices), len(devices) + size))
            devices += [Device(GPUS[kind], len(made), 0) for _ in ranks]
            made.append(Node(f"{kind}-{number}".lower(), 0, ranks, inside, nics))
    return Topology(tuple(devices), tuple(made), ("measured",))


def _network_cards(one: Channel, together: Channel, gpus: int) -> tuple[Channel, ...]:
    """The NICs of a node: the first has the bandwidth of one sending GPU, and all have that of all GPUs together."""
    if together.bytes_per_second <= FILLED * one.bytes_per_second:
        return (together,)
    rest = gpus - 1
    curve = together.curve
    if together.curve and one.curve:
        a, b, c = ((total - each) / rest for total, each in zip(together.curve, one.curve, strict=True))
        curve = (a, b, c)
    left = (together.bytes_per_second - one.bytes_per_second) / rest
    return (one, *(replace(together, bytes_per_second=left, curve=curve),) * rest)


def profile_part(
    profile: ModelProfile, devices: Sequence[str], degrees: Sequence[int], max_micro_batch: int
) -> ModelProfile:
    """The part of ``profile`` for these kinds of device and tensor-parallel degrees, up to ``max_micro_batch``."""
    fields = {name: getattr(profile, name) for name in ModelProfile.model_fields}
    fields["times"] = tuple(
        times
        for times in profile.times
        if times.device in devices and times.tensor_parallel in degrees and times.micro_batch <= max_micro_batch
    )
    fields["sizes"] = tuple(sizes for sizes in profile.sizes if sizes.tensor_parallel in degrees)
    return ModelProfile(**fields)


def _divide_step(step_seconds: float, parameter_bytes: Sequence[int], before: int, after: int) -> tuple[float, ...]:
    """Seconds of the optimizer's step for each layer of the whole model, from the step of the model that was timed."""
    timed = sum(parameter_bytes[:before]) + sum(parameter_bytes[len(parameter_bytes) - after :])
    timed += BLOCKS_TIMED * parameter_bytes[before]
    return tuple(round(step_seconds * each / timed, 9) for each in parameter_bytes)


def _layers(path: Path, model: str, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows of a model, ordered by layer, for each of these keys; all but the name of a GPU are numbers."""
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in _rows(path):
        if row["model"] == model:
            groups[tuple(row[key] if key == "gpu" else int(row[key]) for key in keys)].append(row)
    return {key: sorted(rows, key=lambda row: int(row["layer"])) for key, rows in groups.items()}


def _rows(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
