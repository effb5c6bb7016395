"""Layer times and bandwidths of real GPUs, from the tables that the authors of Sailor published (SOSP 2025).

The tables are CSV: ``layer_times.csv``, ``layer_memory.csv``, ``bandwidth.csv``, and ``models.json`` with the number of
layers of each model. What they are is known from their own figures, and from the public code that made them
(github.com/eth-easl/sailor, MIT):

- Training is in single precision. A logit, an activation that is sent on and a parameter have four bytes: 412,090,372
  leave OPT-350's head, 2048 × 50304 logits and the loss. Matrix products run in TF32 where a card has it: an A100
  reaches 27 TFLOP/s on OPT-350's layers, and only 19.5 without tensor cores. So parameters, gradients and Adam's two
  moments are four times the parameters (``state_factor``), and replicas sum as much as parameters take.
- ``update_seconds`` is the optimizer's step of the model that was timed, an embedding, two blocks and a head, and is
  given for each layer. Adam reads four arrays and writes three: over the parameters of those four layers that makes
  0.75 TB/s on V100-16 and 1.24 on A100-40, for both models and all degrees but the smallest slices, where memory has
  0.9 and 1.6. So here the step is divided among layers by their parameters. A step of 0 was not timed.
- Bandwidth is that of all GPUs that take part together (for ``inside a node``: of all pairs together), by the size of
  the message that each of them sends.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ...io.json_files import read_json
from ..cluster.gpu_catalog import GPUS, INSIDE
from ..cluster.topology import Channel, Device, Node, Topology
from ..profile.layer_profile import LayerSizes, LayerTimes, ModelProfile

__all__ = [
    "GpuChannels",
    "GpuTables",
    "import_bandwidths",
    "import_gpu_profiles",
    "make_topology",
    "profile_part",
    "read_gpu_tables",
]

SOURCE = "timed by the authors of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich)"
BLOCKS_TIMED = 2
"""Of the model whose step was timed; the other blocks' rows repeat the second one's."""

TIME_COLUMNS = ("forward_seconds", "backward_seconds", "update_seconds")
SIZE_COLUMNS = ("parameter_bytes", "activation_bytes", "output_bytes")
INSIDE_NODE, BETWEEN_NODES = "inside a node", "between nodes"

Row = Mapping[str, str]


@dataclass(frozen=True)
class GpuChannels:
    """How GPUs of one kind reach each other, by how many of a node take part at once.

    Rates are of all that take part together, curves by the bytes that each of them sends: one of n gets an n-th.
    """

    inside: Mapping[int, Channel]
    """By 2, 4, 8 GPUs of a node, which make half as many pairs."""
    between: Mapping[int, Channel]
    """By 1, 2, 4, 8 GPUs of a node that each send to one of another node."""


@dataclass(frozen=True)
class GpuTables:
    """What the tables hold of one model."""

    profile: ModelProfile
    left_out: tuple[str, ...]
    """In words: GPUs with rows that cannot be of this model, and why; GPUs whose step was not timed."""


def import_gpu_profiles(folder: Path | str, model: str) -> ModelProfile:
    """What was measured of ``model``; devices are named as in ``gpus.py``.

    Rows that cannot be of this model are left out, see :func:`read_gpu_tables`.

    Raises:
        ValueError: as :func:`read_gpu_tables`.
    """
    return read_gpu_tables(folder, model).profile


def read_gpu_tables(folder: Path | str, model: str) -> GpuTables:
    """What was measured of ``model``, and what of the tables is not used.

    A GPU's rows are left out if their number of layers is not the model's: the published rows of GPT-Neo-2.7 on GH-96
    have the 26 layers of OPT-350 and its times, to the last digit.

    Raises:
        ValueError: a file or a column is missing, a number is none, the model is unknown, or no rows are left.
    """
    folder = Path(folder)
    sizes = _sizes(folder / "layer_memory.csv", model)
    layers = len(sizes[0].parameter_bytes)
    stated = _stated_layers(folder / "models.json").get(model, layers)
    if stated != layers:
        raise ValueError(
            f"{folder / 'layer_memory.csv'} has {layers} layers of {model}, models.json says {stated}; one of them is "
            "of another model"
        )
    ends = _ends(sizes[0].parameter_bytes)
    by_degree = {each.tensor_parallel: each for each in sizes}
    groups: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in _rows(folder / "layer_times.csv", ("model", "gpu", "tensor_parallel", "micro_batch", *TIME_COLUMNS)):
        if row["model"] == model:
            groups[row["gpu"], int(row["tensor_parallel"]), int(row["micro_batch"])].append(row)
    times, left_out = [], {}
    for (gpu, degree, micro_batch), rows in groups.items():
        rows = sorted(rows, key=lambda row: int(row["layer"]))
        if len(rows) != layers:
            left_out[gpu] = f"{gpu}: its rows are of {len(rows)} layers, {model} has {layers}: of another model"
            continue
        if degree not in by_degree:
            left_out[gpu] = f"{gpu} at tensor_parallel {degree}: layer_memory.csv has no sizes"
            continue
        forward, backward, update = (tuple(_number(row, column) for row in rows) for column in TIME_COLUMNS)
        if not any(update):
            left_out.setdefault(gpu, f"{gpu}: the optimizer's step was not timed and counts as 0")
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
        raise ValueError(
            f"{folder / 'layer_times.csv'} has no times of {model} that can be used"
            + "".join(f"; {each}" for each in left_out.values())
        )
    times.sort(key=lambda each: each.key)
    profile = ModelProfile(
        name=model,
        precision="fp32",
        before=ends[0],
        after=ends[1],
        source=f"{SOURCE}: layer by layer, fp32 with TF32 products",
        times=tuple(times),
        sizes=tuple(sizes),
    )
    return GpuTables(profile, tuple(left_out[gpu] for gpu in sorted(left_out)))


def import_bandwidths(folder: Path | str) -> dict[str, GpuChannels]:
    """How fast GPUs reach each other, by their kind. Between nodes all are "Ethernet", so that kinds can be mixed.

    Raises:
        ValueError: the file or a column is missing, or a number is none.
    """
    path = Path(folder) / "bandwidth.csv"
    found: dict[str, dict[str, dict[int, Channel]]] = defaultdict(lambda: {INSIDE_NODE: {}, BETWEEN_NODES: {}})
    for row in _rows(path, ("gpu", "where", "gpus", "a", "b", "c", "max_bytes_per_second")):
        gpu, where = row["gpu"], row["where"]
        if where not in (INSIDE_NODE, BETWEEN_NODES):
            raise ValueError(f"{path} has {where!r} as a place; there are {INSIDE_NODE!r} and {BETWEEN_NODES!r}")
        kind = "Ethernet" if where == BETWEEN_NODES else INSIDE[gpu].kind if gpu in INSIDE else "PCIe"
        found[gpu][where][int(row["gpus"])] = Channel(
            kind,
            _number(row, "max_bytes_per_second"),
            curve=(_number(row, "a"), _number(row, "b"), _number(row, "c")),
        )
    return {gpu: GpuChannels(places[INSIDE_NODE], places[BETWEEN_NODES]) for gpu, places in found.items()}


def make_topology(channels: Mapping[str, GpuChannels], nodes: Sequence[tuple[str, int, int]]) -> Topology:
    """Nodes in one network, with the bandwidths that were measured.

    A node's NIC has the rate of as many GPUs as the node has, together. Its devices reach each other at the least of
    the rates measured inside: between some pairs there is more.

    Args:
        channels: by kind of GPU.
        nodes: kind, how many nodes, how many GPUs in each.

    Raises:
        ValueError: a kind without bandwidths, or that ``gpus.py`` does not have.
    """
    devices: list[Device] = []
    made: list[Node] = []
    for kind, count, size in nodes:
        if kind not in channels or kind not in GPUS:
            known = ", ".join(each for each in channels if each in GPUS)
            raise ValueError(f"no measured bandwidths of {kind}; there are of {known}")
        inside = min(channels[kind].inside.values(), key=lambda channel: channel.bytes_per_second)
        between = channels[kind].between
        nic = between[max((each for each in between if each <= size), default=min(between))]
        for number in range(count):
            ranks = tuple(range(len(devices), len(devices) + size))
            devices += [Device(GPUS[kind], len(made), 0) for _ in ranks]
            made.append(Node(f"{kind}-{number}".lower(), 0, ranks, inside, (nic,)))
    return Topology(tuple(devices), tuple(made), ("measured",))


def profile_part(
    profile: ModelProfile, devices: Sequence[str], degrees: Sequence[int], largest_micro_batch: int
) -> ModelProfile:
    """What ``profile`` has of these kinds of device and tensor-parallel degrees, up to that micro-batch."""
    fields = {name: getattr(profile, name) for name in ModelProfile.model_fields}
    fields["times"] = tuple(
        times
        for times in profile.times
        if times.device in devices and times.tensor_parallel in degrees and times.micro_batch <= largest_micro_batch
    )
    fields["sizes"] = tuple(sizes for sizes in profile.sizes if sizes.tensor_parallel in degrees)
    return ModelProfile(**fields)


def _divide_step(step_seconds: float, parameter_bytes: Sequence[int], ends: tuple[int, int]) -> tuple[float, ...]:
    """The timed model's step, by layer of the whole model."""
    before, after = ends
    timed = sum(parameter_bytes[:before]) + sum(parameter_bytes[len(parameter_bytes) - after :])
    timed += BLOCKS_TIMED * parameter_bytes[before]
    return tuple(round(step_seconds * each / timed, 9) for each in parameter_bytes)


def _ends(parameter_bytes: Sequence[int]) -> tuple[int, int]:
    """How many layers are before and after the blocks, which all have as many parameters."""
    after = next(count for count, each in enumerate(reversed(parameter_bytes)) if each == parameter_bytes[1])
    return 1, after


def _sizes(path: Path, model: str) -> list[LayerSizes]:
    by_degree: dict[int, list[Row]] = defaultdict(list)
    models = set()
    for row in _rows(path, ("model", "tensor_parallel", "layer", *SIZE_COLUMNS)):
        models.add(row["model"])
        if row["model"] == model:
            by_degree[int(row["tensor_parallel"])].append(row)
    if not by_degree:
        close = get_close_matches(model, sorted(models), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{path} has no model {model!r}, only {', '.join(sorted(models)) or 'none'}{hint}")
    sizes = []
    for degree in sorted(by_degree):
        rows = sorted(by_degree[degree], key=lambda row: int(row["layer"]))
        parameters, activations, outputs = (tuple(int(_number(row, column)) for row in rows) for column in SIZE_COLUMNS)
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
        raise ValueError(f"{path}: no such file; the tables are needed as a folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _number(row: Row, column: str) -> float:
    try:
        value = float(row[column])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{row['']}: {column} is {row[column]!r}, not a number")
    return value
