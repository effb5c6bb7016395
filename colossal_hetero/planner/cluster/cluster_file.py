"""The cluster file: the machines to train on, in TOML, written by hand or by ``colossal-hetero probe``.

``docs/file-formats.md`` has an example, and all fields with their defaults.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomlkit
import tomlkit.exceptions

from ...common.atomic_files import replacing
from ...common.files import check_file, read_text
from .cluster_schema import (
    FLOPS,
    LATENCIES,
    MEMORY,
    MEMORY_RESERVE,
    NETWORKS,
    RATES,
    SCHEMA,
    TOTAL_RATES,
    ClusterFields,
    KindFields,
    NodeFields,
    Units,
    read_number,
    suggest,
)
from .gpu_catalog import GPUS, INSIDE, usual_memory_reserve
from .topology import Channel, Device, DeviceKind, Node, Topology

__all__ = ["load_cluster", "parse_cluster", "save_cluster", "write_cluster"]

Table = TypeVar("Table", tomlkit.items.Table, tomlkit.items.InlineTable)


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
    file = check_file(name, content, json_text, ClusterFields, kind="cluster file", schema=SCHEMA)
    try:
        topology = _build(file)
        _check_reachable(topology)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return topology


def _build(file: ClusterFields) -> Topology:
    described = {name: _described_kind(name, kind) for name, kind in file.kinds.items()}
    kinds = {**GPUS, **described}
    devices: list[Device] = []
    nodes: list[Node] = []
    for cluster_number, cluster in enumerate(file.clusters):
        for part in cluster.nodes:
            for name in part.names(cluster.name):
                first = len(devices)
                for alike in part.devices:
                    if alike.kind not in kinds:
                        raise ValueError(
                            f"node {name}: there is no device kind {alike.kind}{suggest(alike.kind, kinds)}; the "
                            f"presets are {', '.join(GPUS)}; others are described in the file: "
                            f"[kinds.{tomlkit.key(alike.kind).as_string()}] with memory_gb and tflops"
                        )
                    devices += [
                        Device(kinds[alike.kind], len(nodes), cluster_number, alike.speed) for _ in range(alike.count)
                    ]
                ranks = tuple(range(first, len(devices)))
                inside = _usual_inside(name, part) if part.inside is None else part.inside.channel()
                nics = sorted((nic.channel() for nic in part.nics), key=lambda nic: -nic.bytes_per_second)
                shared = None if part.inside is None else part.inside.given(TOTAL_RATES)
                price = _node_price(part, file.kinds)
                nodes.append(Node(name, cluster_number, ranks, inside, tuple(nics), shared or math.inf, price))
    numbers = {cluster.name: number for number, cluster in enumerate(file.clusters)}
    between = tuple((numbers[link.clusters[0]], numbers[link.clusters[1]], link.channel()) for link in file.links)
    egress = tuple(
        (numbers[link.clusters[0]], numbers[link.clusters[1]], link.dollars_per_gigabyte)
        for link in file.links
        if link.dollars_per_gigabyte
    )
    return Topology(tuple(devices), tuple(nodes), tuple(numbers), between, egress)


def _node_price(part: NodeFields, kinds: Mapping[str, KindFields]) -> float | None:
    """Dollars per hour; None if the price of one of its devices is not known."""
    if part.dollars_per_hour is not None:
        return part.dollars_per_hour
    total = 0.0
    for alike in part.devices:
        price = kinds[alike.kind].dollars_per_hour if alike.kind in kinds else None
        if price is None:
            return None
        total += alike.count * price
    return total


def _described_kind(name: str, kind: KindFields) -> DeviceKind:
    preset = GPUS.get(name)
    memory, flops, reserve = (kind.given(units) for units in (MEMORY, FLOPS, MEMORY_RESERVE))
    if preset is not None:
        memory, flops = memory or preset.memory_bytes, flops or preset.flops
    if memory is None or flops is None:
        missing = "memory_gb" if memory is None else "tflops"
        raise ValueError(
            f"kinds.{name} has no {missing}, and there is no preset of that name{suggest(name, GPUS)}; give {missing}"
        )
    memory = round(memory)
    return DeviceKind(name, memory, flops, usual_memory_reserve(memory) if reserve is None else round(reserve))


def _usual_inside(node: str, part: NodeFields) -> Channel:
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


SINGLE_DEVICE = Channel("PCIe", 15.75e9)
"""Of a node with a single device: nothing is sent over it."""


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
    content["clusters"] = [
        {
            "name": name,
            "nodes": tomlkit.items.AoT(
                [
                    _node_table(topology, alike)
                    for alike in _alike(topology, [node for node in topology.nodes if node.cluster == number])
                ]
            ),
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


def _alike(topology: Topology, nodes: Sequence[Node]) -> list[list[Node]]:
    """Consecutive nodes that can be written with a count: alike, and named ``x-0``, ``x-1``, …"""
    groups: list[list[Node]] = []
    for node in nodes:
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
    return _filled(tomlkit.table(), fields)


def _array(rows: Sequence[Mapping[str, Any]]) -> tomlkit.items.Array:
    array = tomlkit.array()
    array.extend([_inline(row) for row in rows])
    return array.multiline(len(rows) > 1)


def _inline(fields: Mapping[str, Any]) -> tomlkit.items.InlineTable:
    return _filled(tomlkit.inline_table(), fields)


def _filled(table: Table, fields: Mapping[str, Any]) -> Table:
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
            read = read_number(number, unit)
            if (round(read) if whole else read) == value:
                return {field: int(number) if number == int(number) else number}
    return {field: value}
