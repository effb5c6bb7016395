"""Fields of the cluster file and their valid values; ``docs/file-formats.md`` explains them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ...common.files import BytesPerSecond, Factor, FilePart, Flops, Seconds
from .topology import Channel

__all__ = [
    "FLOPS",
    "LATENCIES",
    "MEMORY",
    "MEMORY_RESERVE",
    "NETWORKS",
    "RATES",
    "SCHEMA",
    "TOTAL_RATES",
    "ClusterFields",
    "KindFields",
    "NodeFields",
    "Units",
    "read_number",
    "suggest",
]

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
        return next((read_number(number, unit) for number, unit in fields if number is not None), None)


class KindFields(_InUnits):
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


class NodeFields(FilePart):
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
    nodes: Annotated[tuple[NodeFields, ...], Field(min_length=1)]


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


class ClusterFields(FilePart):
    schema_version: Literal[1] = Field(alias="schema")
    kinds: dict[Name, KindFields] = Field(default_factory=dict)
    clusters: Annotated[tuple[_Cluster, ...], Field(min_length=1)]
    links: tuple[_ClusterLink, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> ClusterFields:
        parts = [node for cluster in self.clusters for node in cluster.nodes]
        total = sum((node.count or 1) * sum(alike.count for alike in node.devices) for node in parts)
        if total > MAX_DEVICES:
            raise ValueError(f"these are {total} devices; at most {MAX_DEVICES} can be planned for")
        names = [cluster.name for cluster in self.clusters]
        if (twice := _twice(names)) is not None:
            raise ValueError(f"two clusters have the name {twice}")
        nodes = [name for cluster in self.clusters for node in cluster.nodes for name in node.names(cluster.name)]
        if (twice := _twice(nodes)) is not None:
            raise ValueError(f"two nodes have the name {twice}; give each [[clusters.nodes]] a name of its own")
        for number, link in enumerate(self.links):
            for name in link.clusters:
                if name not in names:
                    raise ValueError(f"links[{number}] joins {name}, which is not a cluster{suggest(name, names)}")
        if (twice := _twice(" and ".join(sorted(link.clusters)) for link in self.links)) is not None:
            raise ValueError(f"two links join {twice}; give their bandwidth together")
        return self


def suggest(name: str, names: Iterable[str]) -> str:
    """End of a message about an unknown name: similar ones of ``names``, if there are any."""
    by_lower = {each.lower(): each for each in names}
    longer = [each for each in by_lower if each.startswith(name.lower())]
    close = dict.fromkeys([*longer, *get_close_matches(name.lower(), by_lower, n=3, cutoff=0.5)])
    return f"; did you mean {' or '.join(by_lower[each] for each in list(close)[:3])}?" if close else ""


def read_number(number: float, unit: float) -> float:
    # 1e-6 is not exact, but a million is, so 80 µs are exactly 8e-05 s.
    return number * unit if unit >= 1 else number / round(1 / unit)


def _twice(names: Iterable[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
