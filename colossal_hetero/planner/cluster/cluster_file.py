"""The cluster file: the machines to train on, in TOML, written by hand or by ``colossal-hetero probe``.

``docs/file-formats.md`` has an example, and all fields with their defaults.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tomlkit
import tomlkit.exceptions
from pydantic import Field, field_validator, model_validator

from ...common.atomic_files import replacing
from ...common.files import BytesPerSecond, Factor, FilePart, Flops, Seconds, check_file, first_repeated, read_text
from .gpu_catalog import GPUS, INSIDE, usual_memory_reserve
from .topology import Channel, Device, DeviceKind, Node, Topology

SCHEMA = 1

NETWORKS = ("InfiniBand", "RoCE", "Ethernet")
"""Known kinds of NIC. Other kinds are possible, if they have the same name everywhere."""

Units = Mapping[str, float]
"""Fields that give one number in different units, with the factors to its base unit."""

MEMORY: Units = {"memory_gb": 1e9, "memory_bytes": 1.0}
MEMORY_RESERVE: Units = {"memory_reserve_gb": 1e9, "memory_reserve_bytes": 1.0}
FLOPS: Units = {"tflops": 1e12, "flops": 1.0}
RATES: Units = {"gigabits_per_second": 1e9 / 8, "gigabytes_per_second": 1e9, "bytes_per_second": 1.0}
TOTAL_RATES: Units = {f"total_{name}": factor for name, factor in RATES.items()}
"""Bandwidth that all transfers inside a node share."""
LATENCIES: Units = {"latency_microseconds": 1e-6, "latency_seconds": 1.0}

Gigabytes = Annotated[float, Field(ge=0, le=1e9)]
Rate = Annotated[float, Field(ge=1e-15, le=1e30)]
Dollars = Annotated[float, Field(ge=0, le=1e9)]
CurveTerm = Annotated[float, Field(ge=-1e9, le=1e9)]
Name = Annotated[str, Field(min_length=1)]
MAX_DEVICES = 65536
"""Limit for a cluster file, so that a typing mistake does not fill the memory of the machine that plans."""
Count = Annotated[int, Field(ge=1, le=MAX_DEVICES)]


class _InUnits(FilePart):
    units: ClassVar[tuple[Units, ...]] = ()

    @model_validator(mode="after")
    def _once(self) -> _InUnits:
        for units in self.units:
            given = [name for name in units if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"give either {' or '.join(given)}")
        return self

    def given(self, units: Units) -> float | None:
        """The number in its base unit; None if no field gives it."""
        fields = ((getattr(self, name), unit) for name, unit in units.items())
        return next((_read_number(number, unit) for number, unit in fields if number is not None), None)


class _Kind(_InUnits):
    """A kind of device. Fields that are left out have the values of the preset of that name."""

    units = (MEMORY, MEMORY_RESERVE, FLOPS)
    memory_gb: Annotated[float, Field(ge=1e-9, le=1e9)] | None = None
    memory_bytes: Annotated[int, Field(gt=0, le=10**18)] | None = None
    memory_reserve_gb: Gigabytes | None = None
    memory_reserve_bytes: Annotated[int, Field(ge=0, le=10**18)] | None = None
    tflops: Annotated[float, Field(ge=1e-12, le=1e12)] | None = None
    flops: Flops | None = None
    dollars_per_hour: Dollars | None = None
    """Price of one device, for nodes that have no price of their own."""


class _Channel(_InUnits):
    units: ClassVar[tuple[Units, ...]] = (RATES, LATENCIES)
    kind: Name
    gigabits_per_second: Rate | None = None
    gigabytes_per_second: Rate | None = None
    bytes_per_second: BytesPerSecond | None = None
    latency_microseconds: Annotated[float, Field(ge=0, le=1e15)] | None = None
    latency_seconds: Seconds | None = None
    curve: tuple[CurveTerm, CurveTerm, CurveTerm] | None = None

    @model_validator(mode="after")
    def _valid(self) -> _Channel:
        self.channel()
        return self

    def channel(self) -> Channel:
        rate = self.given(RATES)
        if rate is None:
            raise ValueError("a bandwidth is missing: give gigabits_per_second or gigabytes_per_second")
        return Channel(self.kind, rate, self.given(LATENCIES) or 0.0, self.curve)


class _Inside(_Channel):
    """Channel between two devices of a node, and the bandwidth that all such transfers share."""

    units = (RATES, LATENCIES, TOTAL_RATES)
    total_gigabits_per_second: Rate | None = None
    total_gigabytes_per_second: Rate | None = None
    total_bytes_per_second: BytesPerSecond | None = None


class _Network(_Channel):
    @field_validator("kind")
    @classmethod
    def _known_spelling(cls, kind: str) -> str:
        # If a kind is spelled in two ways, two nodes would silently not have it in common.
        close = get_close_matches(kind.lower(), [name.lower() for name in NETWORKS], n=1, cutoff=0.8)
        wanted = next((name for name in NETWORKS if close and name.lower() == close[0]), kind)
        if kind != wanted:
            raise ValueError(f"kind {kind!r} is not known; did you mean {wanted}?")
        return kind


class _Devices(FilePart):
    kind: Name
    count: Count = 1
    speed: Factor = 1.0


class _Nodes(FilePart):
    name: Name | None = None
    count: Count | None = None
    devices: Annotated[tuple[_Devices, ...], Field(min_length=1)]
    inside: _Inside | None = None
    nics: tuple[_Network, ...] = ()
    """Network cards. Several may be of one kind: a message uses one of them, and messages share all of them."""
    dollars_per_hour: Dollars | None = None

    def names(self, cluster: str) -> list[str]:
        name = cluster if self.name is None else self.name
        return [name] if self.count is None else [f"{name}-{number}" for number in range(self.count)]


class _Cluster(FilePart):
    name: Name
    training_speed: Factor | None = None
    nodes: Annotated[tuple[_Nodes, ...], Field(min_length=1)]


class _ClusterLink(_Network):
    clusters: tuple[Name, Name]
    dollars_per_gigabyte: Dollars | None = None
    """Price of what is sent over it, in either direction."""

    @field_validator("clusters")
    @classmethod
    def _two(cls, clusters: tuple[str, str]) -> tuple[str, str]:
        if clusters[0] == clusters[1]:
            raise ValueError(f"a link joins two clusters, not {clusters[0]} with itself")
        return clusters


class _File(FilePart):
    schema_version: Literal[1] = Field(alias="schema")
    kinds: dict[Name, _Kind] = Field(default_factory=dict)
    clusters: Annotated[tuple[_Cluster, ...], Field(min_length=1)]
    links: tuple[_ClusterLink, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> _File:
        parts = [node for cluster in self.clusters for node in cluster.nodes]
        total = sum((node.count or 1) * sum(alike.count for alike in node.devices) for node in parts)
        if total > MAX_DEVICES:
            raise ValueError(f"these are {total} devices; at most {MAX_DEVICES} can be planned for")
        names = [cluster.name for cluster in self.clusters]
        if (twice := first_repeated(names)) is not None:
            raise ValueError(f"two clusters have the name {twice}")
        without = [cluster.name for cluster in self.clusters if cluster.training_speed is None]
        if 0 < len(without) < len(names):
            raise ValueError(f"cluster {without[0]} has no training_speed, but others have; give it to all or to none")
        nodes = [name for cluster in self.clusters for node in cluster.nodes for name in node.names(cluster.name)]
        if (twice := first_repeated(nodes)) is not None:
            raise ValueError(f"two nodes have the name {twice}; give each [[clusters.nodes]] a name of its own")
        for number, link in enumerate(self.links):
            for name in link.clusters:
                if name not in names:
                    raise ValueError(f"links[{number}] joins {name}, which is not a cluster{_suggest(name, names)}")
        if (twice := first_repeated(" and ".join(sorted(link.clusters)) for link in self.links)) is not None:
            raise ValueError(f"two links join {twice}; give their bandwidth together")
        return self


def _suggest(name: str, names: Iterable[str]) -> str:
    """End of a message about an unknown name: similar ones of ``names``, if there are any."""
    by_lower = {each.lower(): each for each in names}
    longer = [each for each in by_lower if each.startswith(name.lower())]
    close = dict.fromkeys([*longer, *get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)])
    return f"; did you mean {' or '.join(by_lower[each] for each in list(close)[:3])}?" if close else ""


def _read_number(number: float, unit: float) -> float:
    # 1e-6 is not exact, but a million is, so 80 µs are exactly 8e-05 s.
    return number * unit if unit >= 1 else number / round(1 / unit)


# Reading --------------------------------------------------------------------------------------------------------------


def load_cluster(path: Path | str) -> Topology:
    """Read a cluster file. Ranks are numbered cluster by cluster, node by node, device by device."""
    return parse_cluster(read_text(path, "TOML"), str(path))


def parse_cluster(text: str, name: str = "the cluster file") -> Topology:
    """Read the text of a cluster file; ``name`` is used in messages."""
    try:
        content = tomlkit.parse(text).unwrap()
        json_text = json.dumps(content, default=str)
    except tomlkit.exceptions.TOMLKitError as error:
        raise ValueError(f"{name} is not TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{name} cannot be read: its lists or tables are nested too deeply") from None
    file = check_file(name, content, json_text, _File, kind="cluster file", schema=SCHEMA)
    try:
        topology = _build(file)
        _check_reachable(topology)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return topology


def _build(file: _File) -> Topology:
    kinds = {**GPUS, **{name: _described_kind(name, kind) for name, kind in file.kinds.items()}}
    devices: list[Device] = []
    nodes: list[Node] = []
    for cluster_number, cluster in enumerate(file.clusters):
        for part in cluster.nodes:
            for name in part.names(cluster.name):
                first = len(devices)
                for alike in part.devices:
                    if alike.kind not in kinds:
                        raise ValueError(
                            f"node {name}: there is no device kind {alike.kind}{_suggest(alike.kind, kinds)}; the "
                            f"presets are {', '.join(GPUS)}; others are described in the file: "
                            f"[kinds.{tomlkit.key(alike.kind).as_string()}] with memory_gb and tflops"
                        )
                    device = Device(kinds[alike.kind], len(nodes), cluster_number, alike.speed, cluster.training_speed)
                    devices += [device] * alike.count
                ranks = tuple(range(first, len(devices)))
                inside = _usual_inside(name, part) if part.inside is None else part.inside.channel()
                nics = sorted((nic.channel() for nic in part.nics), key=lambda nic: -nic.bytes_per_second)
                shared = None if part.inside is None else part.inside.given(TOTAL_RATES)
                price = _node_price(part, file.kinds)
                nodes.append(Node(name, cluster_number, ranks, inside, tuple(nics), shared or math.inf, price))
    numbers = {cluster.name: number for number, cluster in enumerate(file.clusters)}
    links = [(numbers[link.clusters[0]], numbers[link.clusters[1]], link) for link in file.links]
    between = tuple((one, other, link.channel()) for one, other, link in links)
    egress = tuple((one, other, link.dollars_per_gigabyte) for one, other, link in links if link.dollars_per_gigabyte)
    return Topology(tuple(devices), tuple(nodes), tuple(numbers), between, egress)


def _node_price(part: _Nodes, kinds: Mapping[str, _Kind]) -> float | None:
    """Dollars per hour; None if the price of one of its devices is not known."""
    if part.dollars_per_hour is not None:
        return part.dollars_per_hour
    prices = [kinds[alike.kind].dollars_per_hour if alike.kind in kinds else None for alike in part.devices]
    each = [alike.count * price for alike, price in zip(part.devices, prices, strict=True) if price is not None]
    return sum(each, 0.0) if len(each) == len(prices) else None


def _described_kind(name: str, kind: _Kind) -> DeviceKind:
    preset = GPUS.get(name)
    memory, flops, reserve = (kind.given(units) for units in (MEMORY, FLOPS, MEMORY_RESERVE))
    if preset is not None:
        memory, flops = memory or preset.memory_bytes, flops or preset.flops
    if memory is None or flops is None:
        missing = "memory_gb" if memory is None else "tflops"
        raise ValueError(
            f"kinds.{name} has no {missing}, and there is no preset of that name{_suggest(name, GPUS)}; give {missing}"
        )
    memory = round(memory)
    return DeviceKind(name, memory, flops, usual_memory_reserve(memory) if reserve is None else round(reserve))


def _usual_inside(node: str, part: _Nodes) -> Channel:
    """Slowest of the usual channels between the devices of a node, which must be of one kind."""
    own = [alike.kind for alike in part.devices if alike.kind not in INSIDE]
    usual = [INSIDE[alike.kind] for alike in part.devices if alike.kind in INSIDE]
    if own and sum(alike.count for alike in part.devices) == 1:
        return SINGLE_DEVICE
    if own or len({channel.kind for channel in usual}) > 1:
        reason = (
            f"the link between {own[0]} devices is unknown"
            if own
            else "its kinds of devices usually have different links"
        )
        raise ValueError(
            f'node {node} has no inside, and {reason}; give one, e.g. inside = {{ kind = "PCIe", '
            "gigabytes_per_second = 15.75 }"
        )
    return min(usual, key=lambda channel: channel.bytes_per_second)


SINGLE_DEVICE = Channel("PCIe", 15.75e9)  # of a node with a single device: nothing is sent over it


def _check_reachable(topology: Topology) -> None:
    """Raise ``ValueError`` unless each node reaches every other. Two nodes of a class stand for all of it."""
    seen: Counter[tuple[int, tuple[Channel, ...]]] = Counter()
    kept = []
    for number, node in enumerate(topology.nodes):
        seen[node.cluster, node.nics] += 1
        if seen[node.cluster, node.nics] <= 2:
            kept.append(number)
    for a, b in itertools.combinations(kept, 2):
        topology.node_channel(a, b)


# Writing --------------------------------------------------------------------------------------------------------------


def save_cluster(topology: Topology, path: Path | str, comment: str = "") -> None:
    """Write a cluster file from which :func:`load_cluster` reads ``topology``, atomically."""
    text = write_cluster(topology, comment)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_cluster(topology: Topology, comment: str = "") -> str:
    content: dict[str, Any] = {"schema": SCHEMA}
    own = {device.kind for device in topology.devices if GPUS.get(device.kind.name) != device.kind}
    if own:
        content["kinds"] = {kind.name: _kind_fields(kind) for kind in sorted(own, key=lambda kind: kind.name)}
    speeds = {device.cluster: device.training_speed for device in topology.devices}
    content["clusters"] = [
        {
            "name": name,
            **({} if speeds[number] is None else {"training_speed": speeds[number]}),
            "nodes": tomlkit.items.AoT([_node_table(topology, alike) for alike in _alike(topology, number)]),
        }
        for number, name in enumerate(topology.clusters)
    ]
    if topology.between:
        prices = {(one, other): price for one, other, price in topology.egress}
        content["links"] = [
            {
                "clusters": [topology.clusters[one], topology.clusters[other]],
                **_channel_fields(channel),
                **({"dollars_per_gigabyte": prices[one, other]} if (one, other) in prices else {}),
            }
            for one, other, channel in topology.between
        ]
    lines = [f"# {line}".rstrip() if line.strip() else "" for line in comment.splitlines()]
    text = "\n".join([*lines, *([""] if lines else []), tomlkit.dumps(content)])
    if parse_cluster(text) != topology:
        raise ValueError(
            "these machines cannot be written as a cluster file: ranks must be numbered cluster by cluster and node by "
            "node, NICs ordered by descending bandwidth, and devices of one kind's name be alike"
        )
    return text


def _kind_fields(kind: DeviceKind) -> dict[str, float]:
    fields = _best_unit(kind.memory_bytes, MEMORY, whole=True)
    if kind.memory_reserve_bytes != usual_memory_reserve(kind.memory_bytes):
        fields |= _best_unit(kind.memory_reserve_bytes, MEMORY_RESERVE, whole=True)
    return fields | _best_unit(kind.flops, FLOPS)


def _alike(topology: Topology, cluster: int) -> list[list[Node]]:
    """Consecutive nodes that can be written with a count: alike, and named ``x-0``, ``x-1``, …"""
    groups: list[list[Node]] = []
    for node in (each for each in topology.nodes if each.cluster == cluster):
        stem, dash, _ = node.name.rpartition("-")
        if groups and dash and node.name == f"{stem}-{len(groups[-1])}" and groups[-1][0].name == f"{stem}-0":
            first = groups[-1][0]
            same = dataclasses.replace(first, name=node.name, devices=node.devices) == node
            if same and _devices(topology, first) == _devices(topology, node):
                groups[-1].append(node)
                continue
        groups.append([node])
    return groups


def _devices(topology: Topology, node: Node) -> list[dict[str, Any]]:
    devices = [topology.devices[rank] for rank in node.devices]
    rows = []
    for (kind, speed), alike in itertools.groupby(devices, lambda device: (device.kind.name, device.speed)):
        count = len(list(alike))
        rows.append({"kind": kind} | ({"count": count} if count > 1 else {}) | ({"speed": speed} if speed != 1 else {}))
    return rows


def _node_table(topology: Topology, nodes: Sequence[Node]) -> tomlkit.items.Table:
    node = nodes[0]
    fields: dict[str, Any] = {"name": node.name}
    if len(nodes) > 1:
        fields = {"name": node.name.rpartition("-")[0], "count": len(nodes)}
    inside = _channel_fields(node.inside)
    if math.isfinite(node.inside_bytes_per_second):
        inside |= _best_unit(node.inside_bytes_per_second, _largest_first(TOTAL_RATES))
    fields |= {"devices": _array(_devices(topology, node)), "inside": _inline(inside)}
    if node.nics:
        fields["nics"] = _array([_channel_fields(nic) for nic in node.nics])
    if node.dollars_per_hour is not None:
        fields["dollars_per_hour"] = node.dollars_per_hour
    table = tomlkit.table()
    table.update(fields)
    return table


def _array(rows: Sequence[Mapping[str, Any]]) -> tomlkit.items.Array:
    array = tomlkit.array()
    array.extend([_inline(row) for row in rows])
    return array.multiline(len(rows) > 1)


def _inline(fields: Mapping[str, Any]) -> tomlkit.items.InlineTable:
    table = tomlkit.inline_table()
    table.update(fields)
    return table


def _channel_fields(channel: Channel) -> dict[str, Any]:
    # Rates of networks are usually given in bits, rates inside a machine in bytes.
    rates = RATES if channel.kind in NETWORKS else _largest_first(RATES)
    fields = {"kind": channel.kind, **_best_unit(channel.bytes_per_second, rates)}
    if channel.latency_seconds:
        fields.update(_best_unit(channel.latency_seconds, LATENCIES))
    if channel.curve is not None:
        fields["curve"] = list(channel.curve)
    return fields


def _largest_first(units: Units) -> Units:
    return dict(sorted(units.items(), key=lambda item: -item[1]))


def _best_unit(value: float, units: Units, whole: bool = False) -> dict[str, float]:
    """Field with the first unit in which the value is short and is read back exactly."""
    for field, unit in units.items():
        for digits in range(13):
            number = round(value / unit, digits)
            read = _read_number(number, unit)
            if (round(read) if whole else read) == value:
                return {field: int(number) if number == int(number) else number}
    return {field: value}
