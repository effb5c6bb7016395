"""Layer times and bandwidths of real GPUs, from the tables that the authors of Sailor published (SOSP 2025).

The tables are ``layer_times.csv``, ``layer_memory.csv``, ``bandwidth.csv``, and ``models.json`` with the number of
layers of each model. How to read them follows from their values and from the public code that made them
(github.com/eth-easl/sailor, MIT):

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
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from colossal_hetero.io.json_files import read_json
from colossal_hetero.planner.cluster.gpu_catalog import GPUS, INSIDE
from colossal_hetero.planner.cluster.topology import Channel, Device, Node, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile

__all__ = [
    "GpuChannels",
    "GpuTables",
    "import_bandwidths",
    "import_gpu_profiles",
    "make_topology",
    "profile_part",
    "read_gpu_tables",
    "tables_of_rows",
]

SOURCE = "timed by the authors of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich)"
FILLED = 1.05
"""A single GPU fills the network card of its node if all its GPUs together send at most so many times as fast."""
STATE_FACTOR = 6.0
"""24 bytes of state per parameter, as Sailor counts for Megatron-DeepSpeed: parameters, gradients, their sum over
micro-batches, the optimizer's copy of the parameters and two moments, in single precision."""
BLOCKS_TIMED = 2
"""Number of blocks of the model whose step was timed. The rows of the other blocks repeat the second block's."""

MIN_LAYERS = 2
"""The embedding and a block; models without a head have these."""
MAX_DIGITS = 9
"""Of a micro-batch, a degree or the number of a layer."""
TIME_COLUMNS = ("forward_seconds", "backward_seconds", "update_seconds")
SIZE_COLUMNS = ("parameter_bytes", "activation_bytes", "output_bytes")
INSIDE_NODE, BETWEEN_NODES = "inside a node", "between nodes"

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


def import_gpu_profiles(folder: Path | str, model: str) -> ModelProfile:
    """The measured profile of ``model``; devices are named as in ``planner/cluster/gpu_catalog.py``.

    Rows that cannot belong to this model are left out, see :func:`read_gpu_tables`.

    Raises:
        ValueError: As :func:`read_gpu_tables`.
    """
    return read_gpu_tables(folder, model).profile


def read_gpu_tables(folder: Path | str, model: str) -> GpuTables:
    """The measured profile of ``model``, and notes on rows that are not used.

    If the rows of a GPU have another number of layers than the model, they are left out: the published rows of
    GPT-Neo-2.7 on GH-96 have the 26 layers of OPT-350 and exactly its times.

    Raises:
        ValueError: A file or a column is missing, a value is not a number, the model is unknown, or no rows are left.
    """
    folder = Path(folder)
    memory, times = folder / "layer_memory.csv", folder / "layer_times.csv"
    size_rows = _rows(memory, ("model", "tensor_parallel", "layer", *SIZE_COLUMNS))
    layers = len({row["layer"] for row in size_rows if row["model"] == model})
    stated = _stated_layers(folder / "models.json").get(model, layers)
    if layers and stated != layers:
        raise ValueError(
            f"{memory} has {layers} layers of {model}, models.json says {stated}; one of them belongs to another model"
        )
    time_rows = _rows(times, ("model", "gpu", "tensor_parallel", "micro_batch", *TIME_COLUMNS))
    return tables_of_rows(model, size_rows, time_rows, memory, times)


def tables_of_rows(
    model: str, size_rows: Sequence[Row], time_rows: Sequence[Row], memory: Path, timed: Path
) -> GpuTables:
    """What rows of layers contain about one model, see :func:`read_gpu_tables`.

    Args:
        model: Name of the model.
        size_rows: One for each model, tensor-parallel degree and layer, with the sizes.
        time_rows: One for each model, GPU, degree, micro-batch and layer, with the times.
        memory: Where the sizes were read, for messages.
        timed: Where the times were read, for messages.
    """
    sizes = _sizes(size_rows, model, memory)
    layers = len(sizes[0].parameter_bytes)
    ends = _ends(sizes[0].parameter_bytes, model, memory)
    by_degree = {each.tensor_parallel: each for each in sizes}
    groups: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in time_rows:
        if row["model"] == model:
            groups[row["gpu"], _whole(row, "tensor_parallel"), _whole(row, "micro_batch")].append(row)
    times, left_out = [], {}
    for (gpu, degree, micro_batch), rows in groups.items():
        rows = sorted(rows, key=lambda row: _whole(row, "layer"))
        if len(rows) != layers:
            left_out[gpu] = (
                f"{gpu}: its rows have {len(rows)} layers, but {model} has {layers}; they belong to another model"
            )
            continue
        if degree not in by_degree:
            left_out[gpu] = f"{gpu} at tensor_parallel {degree}: {memory.name} has no sizes"
            continue
        forward, backward, update = (tuple(_positive(row, column) for row in rows) for column in TIME_COLUMNS)
        if not any(update):
            left_out.setdefault(gpu, f"{gpu}: the optimizer's step was not timed; it is taken as 0")
        times.append(
            LayerTimes(
                device=gpu,
                tensor_parallel=degree,
                micro_batch=micro_batch,
                forward_seconds=forward,
                backward_seconds=backward,
                update_seconds=_divide_step(update[0], by_degree[degree].parameter_bytes, ends),
            )
        )
    if not times:
        raise ValueError(f"{timed} has no usable times of {model}" + "".join(f"; {each}" for each in left_out.values()))
    times.sort(key=lambda each: each.key)
    profile = ModelProfile(
        name=model,
        precision="fp32",
        state_factor=STATE_FACTOR,
        master_copies=True,
        before=ends[0],
        after=ends[1],
        source=f"{SOURCE}: layer by layer, fp32 with TF32 products",
        times=tuple(times),
        sizes=tuple(sizes),
    )
    return GpuTables(profile, tuple(left_out[gpu] for gpu in sorted(left_out)))


def import_bandwidths(folder: Path | str) -> dict[str, GpuChannels]:
    """The measured bandwidths by kind of GPU.

    All channels between nodes are of the kind "Ethernet", so that nodes of different GPUs can be combined.

    Raises:
        ValueError: The file or a column is missing, or a value is not a number.
    """
    path = Path(folder) / "bandwidth.csv"
    found: dict[str, dict[str, dict[int, Channel]]] = defaultdict(lambda: {INSIDE_NODE: {}, BETWEEN_NODES: {}})
    for row in _rows(path, ("gpu", "where", "gpus", "a", "b", "c", "max_bytes_per_second")):
        gpu, where = row["gpu"], row["where"]
        if where not in (INSIDE_NODE, BETWEEN_NODES):
            raise ValueError(f"{path} has the place {where!r}; it must be {INSIDE_NODE!r} or {BETWEEN_NODES!r}")
        kind = "Ethernet" if where == BETWEEN_NODES else INSIDE[gpu].kind if gpu in INSIDE else "PCIe"
        found[gpu][where][_whole(row, "gpus")] = Channel(
            kind,
            _number(row, "max_bytes_per_second"),
            curve=(_number(row, "a"), _number(row, "b"), _number(row, "c")),
        )
    return {gpu: GpuChannels(places[INSIDE_NODE], places[BETWEEN_NODES]) for gpu, places in found.items()}


def make_topology(channels: Mapping[str, GpuChannels], nodes: Sequence[tuple[str, int, int]]) -> Topology:
    """A topology of nodes in one network, with the measured bandwidths.

    A node's NICs together have the bandwidth that was measured for as many sending GPUs as the node has, and none has
    more than that of a single sending GPU, so that a message that is alone does not get more than was measured. All its
    devices reach each other at the lowest bandwidth measured inside a node, although some pairs have more.

    Args:
        channels: Bandwidths by kind of GPU.
        nodes: For each kind of GPU: its name, the number of nodes, the number of GPUs per node.

    Raises:
        ValueError: A kind of GPU has no bandwidths, or is not in ``planner/cluster/gpu_catalog.py``.
    """
    devices: list[Device] = []
    made: list[Node] = []
    for kind, count, size in nodes:
        if kind not in channels or kind not in GPUS:
            known = ", ".join(each for each in channels if each in GPUS)
            raise ValueError(f"no measured bandwidths of {kind}; known kinds are {known}")
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


def _divide_step(step_seconds: float, parameter_bytes: Sequence[int], ends: tuple[int, int]) -> tuple[float, ...]:
    """Seconds of the optimizer's step for each layer of the whole model, from the step of the model that was timed."""
    before, after = ends
    timed = sum(parameter_bytes[:before]) + sum(parameter_bytes[len(parameter_bytes) - after :])
    timed += BLOCKS_TIMED * parameter_bytes[before]
    return tuple(round(step_seconds * each / timed, 9) for each in parameter_bytes)


def _ends(parameter_bytes: Sequence[int], model: str, path: Path) -> tuple[int, int]:
    """The number of layers before and after the blocks. All blocks have the same number of parameters."""
    if len(parameter_bytes) < MIN_LAYERS:
        raise ValueError(
            f"{path} has {len(parameter_bytes)} layers of {model}; needed are at least {MIN_LAYERS}: the embedding and "
            "a block"
        )
    after = next(count for count, each in enumerate(reversed(parameter_bytes)) if each == parameter_bytes[1])
    return 1, after


def _sizes(rows: Sequence[Row], model: str, path: Path) -> list[LayerSizes]:
    by_degree: dict[int, list[Row]] = defaultdict(list)
    models = set()
    for row in rows:
        models.add(row["model"])
        if row["model"] == model:
            by_degree[_whole(row, "tensor_parallel")].append(row)
    if not by_degree:
        close = get_close_matches(model, sorted(models), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{path} has no model {model!r}, only {', '.join(sorted(models)) or 'none'}{hint}")
    sizes = []
    for degree in sorted(by_degree):
        layers = sorted(by_degree[degree], key=lambda row: _whole(row, "layer"))
        parameters, activations, outputs = (
            tuple(int(_positive(row, column)) for row in layers) for column in SIZE_COLUMNS
        )
        sizes.append(
            LayerSizes(
                tensor_parallel=degree,
                parameter_bytes=parameters,
                activation_bytes=activations,
                output_bytes=outputs,
            )
        )
    return sizes


def _stated_layers(path: Path) -> dict[str, int]:
    _, content = read_json(path)
    try:
        return {each["model"]: int(each["num_all_layers"]) for each in content}
    except (TypeError, KeyError) as error:
        raise ValueError(f'{path} is not a list of models with "model" and "num_all_layers": {error}') from None


def _rows(path: Path, columns: Sequence[str]) -> list[Row]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"{path} has no column {', '.join(missing)}; it has {', '.join(reader.fieldnames or ()) or 'none'}"
                )
            return [dict(row, **{"": f"{path}, line {reader.line_num}"}) for row in reader]
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give the folder that has all tables") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not CSV: {error}") from None


def _whole(row: Row, column: str) -> int:
    """A micro-batch, a degree, or the number of a layer."""
    value = row[column]
    if not isinstance(value, str) or not value.strip().isdecimal() or len(value) > MAX_DIGITS:
        raise ValueError(f"{row['']}: {column} is {value!r}, not a whole number from 0 to {10**MAX_DIGITS - 1}")
    return int(value)


def _positive(row: Row, column: str) -> float:
    """A time or a number of bytes."""
    value = _number(row, column)
    if value < 0:
        raise ValueError(f"{row['']}: {column} is {row[column]!r}; it must be at least 0")
    return value


def _number(row: Row, column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{row['']}: {column} is {row[column]!r}, not a number")
    return value
