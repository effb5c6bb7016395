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
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.exceptions

from ...common.atomic_files import replacing
from ...common.files import check_file, read_text
from .cluster_schema import (
    LATENCIES,
    NETWORKS,
    RATES,
    SCHEMA,
    TOTAL_RATES,
    ClusterFields,
    KindFields,
    NodeFields,
    read_number,
    suggest,
)
from .gpu_catalog import GPUS, INSIDE, usual_memory_reserve
from .topology import Channel, Device, DeviceKind, Node, Topology

__all__ = ["load_cluster", "parse_cluster", "save_cluster", "write_cluster"]


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
                shared = math.inf if part.inside is None else part.inside.shared_bytes_per_second
                price = _node_price(part, file.kinds)
                nodes.append(Node(name, cluster_number, ranks, inside, tuple(nics), shared, price))
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
    memory, flops = kind.memory_bytes, kind.flops
    if kind.memory_gb is not None:
        memory = round(kind.memory_gb * 1e9)
    if kind.tflops is not None:
        flops = kind.tflops * 1e12
    memory = preset.memory_bytes if memory is None and preset else memory
    flops = preset.flops if flops is None and preset else flops
    if memory is None or flops is None:
        missing = "memory_gb" if memory is None else "tflops"
        raise ValueError(
            f"kinds.{name} has no {missing}, and there is no preset of that name{suggest(name, GPUS)}; give {missing}"
        )
    reserve = usual_memory_reserve(memory) if kind.memory_reserve_bytes is None else kind.memory_reserve_bytes
    if kind.memory_reserve_gb is not None:
        reserve = round(kind.memory_reserve_gb * 1e9)
    return DeviceKind(name, memory, flops, reserve)


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
    document = tomlkit.document()
    for line in comment.splitlines():
        document.add(tomlkit.comment(line) if line.strip() else tomlkit.nl())
    if comment:
        document.add(tomlkit.nl())
    document.add("schema", tomlkit.item(SCHEMA))
    own = {device.kind for device in topology.devices if GPUS.get(device.kind.name) != device.kind}
    if own:
        kinds = tomlkit.table(is_super_table=True)
        for kind in sorted(own, key=lambda kind: kind.name):
            table = tomlkit.table()
            table.update(_best_unit(kind.memory_bytes, {"memory_gb": 1e9, "memory_bytes": 1}, whole=True))
            if kind.memory_reserve_bytes != usual_memory_reserve(kind.memory_bytes):
                units = {"memory_reserve_gb": 1e9, "memory_reserve_bytes": 1}
                table.update(_best_unit(kind.memory_reserve_bytes, units, whole=True))
            table.update(_best_unit(kind.flops, {"tflops": 1e12, "flops": 1}))
            kinds[kind.name] = table
        document.add("kinds", kinds)
    clusters = tomlkit.aot()
    for number, name in enumerate(topology.clusters):
        cluster = tomlkit.table()
        cluster["name"] = name
        nodes = tomlkit.aot()
        for alike in _alike(topology, [node for node in topology.nodes if node.cluster == number]):
            nodes.append(_node_table(topology, alike))
        cluster["nodes"] = nodes
        clusters.append(cluster)
    document.add("clusters", clusters)
    if topology.between:
        links = tomlkit.aot()
        prices = {(one, other): price for one, other, price in topology.egress}
        for one, other, channel in topology.between:
            link = tomlkit.table()
            link["clusters"] = [topology.clusters[one], topology.clusters[other]]
            link.update(_channel_fields(channel))
            if (one, other) in prices:
                link["dollars_per_gigabyte"] = prices[one, other]
            links.append(link)
        document.add("links", links)
    text = tomlkit.dumps(document)
    if parse_cluster(text) != topology:
        raise ValueError(
            "these machines cannot be written as a cluster file: ranks must be numbered cluster by cluster and node by "
            "node, NICs ordered by descending bandwidth, and devices of one kind's name be alike"
        )
    return text


def _alike(topology: Topology, nodes: Sequence[Node]) -> list[list[Node]]:
    """Consecutive nodes that can be written with a count: alike, and named ``x-0``, ``x-1``, …"""
    groups: list[list[Node]] = []
    for node in nodes:
        stem, dash, _ = node.name.rpartition("-")
        if groups and dash and node.name == f"{stem}-{len(groups[-1])}" and groups[-1][0].name == f"{stem}-0":
            first = groups[-1][0]
            same = dataclasses.replace(first, name=node.name, devices=node.devices) == node
            if same and _groups(topology, first) == _groups(topology, node):
                groups[-1].append(node)
                continue
        groups.append([node])
    return groups


def _groups(topology: Topology, node: Node) -> list[tuple[str, float, int]]:
    devices = [topology.devices[rank] for rank in node.devices]
    return [
        (kind, speed, len(list(alike)))
        for (kind, speed), alike in itertools.groupby(devices, lambda device: (device.kind.name, device.speed))
    ]


def _node_table(topology: Topology, nodes: Sequence[Node]) -> tomlkit.items.Table:
    node = nodes[0]
    table = tomlkit.table()
    table["name"] = node.name.rpartition("-")[0] if len(nodes) > 1 else node.name
    if len(nodes) > 1:
        table["count"] = len(nodes)
    table["devices"] = _rows(
        {"kind": kind, **({"count": count} if count > 1 else {}), **({"speed": speed} if speed != 1 else {})}
        for kind, speed, count in _groups(topology, node)
    )
    inside = _channel_fields(node.inside)
    if math.isfinite(node.inside_bytes_per_second):
        units = dict(sorted(TOTAL_RATES.items(), key=lambda item: -item[1]))
        inside.update(_best_unit(node.inside_bytes_per_second, units))
    table["inside"] = _inline(inside)
    if node.nics:
        table["nics"] = _rows(_channel_fields(nic) for nic in node.nics)
    if node.dollars_per_hour is not None:
        table["dollars_per_hour"] = node.dollars_per_hour
    return table


def _rows(rows: Iterable[Mapping[str, Any]]) -> tomlkit.items.Array:
    array = tomlkit.array()
    tables = [_inline(row) for row in rows]
    array.extend(tables)
    return array.multiline(len(tables) > 1)


def _inline(fields: Mapping[str, Any]) -> tomlkit.items.InlineTable:
    table = tomlkit.inline_table()
    table.update(fields)
    return table


def _channel_fields(channel: Channel) -> dict[str, Any]:
    # Rates of networks are usually given in bits, rates inside a machine in bytes.
    rates = RATES if channel.kind in NETWORKS else dict(sorted(RATES.items(), key=lambda item: -item[1]))
    fields = {"kind": channel.kind, **_best_unit(channel.bytes_per_second, rates)}
    if channel.latency_seconds:
        fields.update(_best_unit(channel.latency_seconds, LATENCIES))
    if channel.curve is not None:
        fields["curve"] = list(channel.curve)
    return fields


def _best_unit(value: float, units: Mapping[str, float], whole: bool = False) -> dict[str, float]:
    """Field with the first unit in which the value is short and is read back exactly."""
    for field, unit in units.items():
        for digits in range(13):
            number = round(value / unit, digits)
            if (round(number * unit) if whole else read_number(number, unit)) == value:
                return {field: int(number) if number == int(number) else number}
    return {field: value}
