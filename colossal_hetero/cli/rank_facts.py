"""Facts about the ranks' machines, and the topology that follows from them: pure functions without torch."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import combinations, zip_longest
from statistics import median_low

from ..planner.cluster.gpu_catalog import GPUS, INSIDE, kind_name, usual_memory_reserve
from ..planner.cluster.group_networks import ETHERNET
from ..planner.cluster.topology import Channel, Device, DeviceKind, MeasuredLink, Node, Topology

TOLERANCE = 0.1  # share by which speeds of devices of a kind may differ to count as equal
MEMORY_TOLERANCE = 0.25  # share by which the memory of devices of one kind may differ
RESERVE_STEP = 10_000_000  # bytes to whose multiples the reserve of a CPU is rounded up


@dataclass(frozen=True)
class Nic:
    kind: str
    bytes_per_second: float | None  # nominal bandwidth; None if the system does not report it


@dataclass(frozen=True)
class RankFacts:
    host: str
    machine: str  # identifier that differs between machines with the same host name
    device: str
    memory_bytes: int
    flops: float  # measured FLOP/s of a matrix product, in half precision on a GPU and in single precision on a CPU
    nics: tuple[Nic, ...] = ()
    used_bytes: int = 0


def nodes_of(facts: Sequence[RankFacts]) -> list[list[int]]:
    """Ranks of each machine; machines are ordered by their first rank."""
    nodes: dict[tuple[str, str], list[int]] = {}
    for rank, fact in enumerate(facts):
        nodes.setdefault((fact.host, fact.machine), []).append(rank)
    return list(nodes.values())


def pairs_to_measure(facts: Sequence[RankFacts]) -> list[list[tuple[int, int]]]:
    """Pairs of ranks in rounds of pairs that have no rank in common and are measured at the same time.

    All pairs inside each machine, and one between each two machines, whose bandwidth is that of one NIC of them.
    """
    nodes = nodes_of(facts)
    inside = zip_longest(*(combinations(ranks, 2) for ranks in nodes))
    rounds = [[pair for pair in pairs if pair is not None] for pairs in inside]
    return rounds + [[(one[0], other[0])] for one, other in combinations(nodes, 2)]


def check_patterns(facts: Sequence[RankFacts], cluster_of: Sequence[tuple[str, str]]) -> None:
    """Raise ``ValueError`` if no host matches a pattern. To be called before links are measured, which takes longer."""
    hosts = sorted({fact.host for fact in facts})
    for pattern, _ in cluster_of:
        if not any(fnmatch(host, pattern) for host in hosts):
            raise ValueError(f"no host matches {pattern}; the hosts are {', '.join(hosts)}")


def make_topology(
    facts: Sequence[RankFacts], links: Sequence[MeasuredLink], cluster_of: Sequence[tuple[str, str]] = ()
) -> tuple[Topology, tuple[int, ...]]:
    """The topology of the machines, and for each of its ranks the rank that was measured. They differ if the machines
    of a cluster were not started one after the other.

    Machines whose fastest NIC is of the same kind form a cluster. A bandwidth between two machines is assigned to the
    fastest kind of NIC that its protocol uses: for Gloo Ethernet, for NCCL the fastest kind that both have. It is that
    of the slower machine, so a machine's bandwidth is the largest that was measured with it.
    """
    nodes = nodes_of(facts)
    names = _unique([facts[ranks[0]].host for ranks in nodes])
    check_patterns(facts, cluster_of)
    cluster_names = [_cluster_name(facts[ranks[0]], cluster_of) for ranks in nodes]
    clusters = list(dict.fromkeys(cluster_names))
    order = sorted(range(len(nodes)), key=lambda number: clusters.index(cluster_names[number]))
    kinds = _kinds(facts)
    fastest: dict[str, float] = {}
    for fact, kind in zip(facts, kinds, strict=True):
        fastest[kind.name] = max(fastest.get(kind.name, 0.0), fact.flops)

    measured = _by_nodes(nodes, links)
    devices: list[Device] = []
    made: list[Node] = []
    for place, number in enumerate(order):
        ranks, cluster = nodes[number], clusters.index(cluster_names[number])
        first = len(devices)
        for rank in ranks:
            share = facts[rank].flops / fastest[kinds[rank].name]
            devices.append(Device(kinds[rank], place, cluster, 1.0 if share > 1 - TOLERANCE else float(f"{share:.3g}")))
        neighbors = {
            other: measured[min(number, other), max(number, other)]
            for other in range(len(nodes))
            if other != number and cluster_names[other] == cluster_names[number]
        }
        nics = _nics(number, nodes, facts, neighbors)
        inside = _inside(kinds[ranks[0]].name, measured.get((number, number), []))
        made.append(Node(names[number], cluster, tuple(range(first, len(devices))), inside, nics))
    between = []
    for i, j in combinations(range(len(clusters)), 2):
        best = [
            _best(found)
            for (one, other), found in measured.items()
            if {cluster_names[one], cluster_names[other]} == {clusters[i], clusters[j]} and found
        ]
        if best:
            between.append((i, j, _middle(best, ETHERNET)))
    topology = Topology(tuple(devices), tuple(made), tuple(clusters), tuple(between))
    return topology, tuple(rank for number in order for rank in nodes[number])


def _kinds(facts: Sequence[RankFacts]) -> list[DeviceKind]:
    """The kind of each rank's device: one name and similar memory. It has the smallest memory, without what processes
    on a CPU use already, and the highest speed of its devices."""
    groups: dict[str, list[list[int]]] = {}
    for rank in sorted(range(len(facts)), key=lambda rank: -facts[rank].memory_bytes):
        name = kind_name(facts[rank].device, facts[rank].memory_bytes)
        alike = groups.setdefault(name, [])
        if alike and facts[rank].memory_bytes >= (1 - MEMORY_TOLERANCE) * facts[alike[-1][0]].memory_bytes:
            alike[-1].append(rank)
        else:
            alike.append([rank])
    kinds: dict[int, DeviceKind] = {}
    for name, several in groups.items():
        for number, ranks in enumerate(several):
            own_name = name if number == 0 else f"{name}-{number + 1}"
            memory = min(facts[rank].memory_bytes for rank in ranks)
            flops = float(f"{max(facts[rank].flops for rank in ranks):.3g}")
            if (preset := GPUS.get(own_name)) is not None:
                memory, flops = min(memory, preset.memory_bytes), preset.flops
            reserve = usual_memory_reserve(memory)
            if facts[ranks[0]].device == "cpu":
                used = max(facts[rank].used_bytes for rank in ranks)
                reserve = min(math.ceil(used / RESERVE_STEP) * RESERVE_STEP, memory - 1)
            own = DeviceKind(own_name, memory, flops, reserve)
            kinds.update(dict.fromkeys(ranks, own))
    return [kinds[rank] for rank in range(len(facts))]


def _cluster_name(fact: RankFacts, cluster_of: Sequence[tuple[str, str]]) -> str:
    for pattern, name in cluster_of:
        if fnmatch(fact.host, pattern):
            return name
    return _fastest_kinds(fact)[0].lower()


def _fastest_kinds(fact: RankFacts) -> list[str]:
    rates: dict[str, float] = {}
    for nic in fact.nics:
        rates[nic.kind] = max(rates.get(nic.kind, 0.0), nic.bytes_per_second or 0.0)
    remote_memory = sorted((kind for kind in rates if kind != ETHERNET), key=lambda kind: -rates[kind])
    return [*remote_memory, ETHERNET]


def _by_nodes(
    nodes: Sequence[Sequence[int]], links: Iterable[MeasuredLink]
) -> dict[tuple[int, int], list[MeasuredLink]]:
    node = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    found: dict[tuple[int, int], list[MeasuredLink]] = defaultdict(list)
    for link in links:
        one, other = sorted(node[rank] for rank in link.ranks)
        found[one, other].append(link)
    return found


def _best(links: Iterable[MeasuredLink]) -> MeasuredLink:
    return max(links, key=lambda link: link.bytes_per_second)


def _nics(
    number: int,
    nodes: Sequence[Sequence[int]],
    facts: Sequence[RankFacts],
    neighbors: Mapping[int, Sequence[MeasuredLink]],
) -> tuple[Channel, ...]:
    """NICs of a machine by descending bandwidth, as measured with other machines of the cluster, otherwise nominal."""
    fact = facts[nodes[number][0]]
    own = _fastest_kinds(fact)
    by_kind: dict[str, list[MeasuredLink]] = {}
    for other, links in neighbors.items():
        common = [kind for kind in own if kind in _fastest_kinds(facts[nodes[other][0]])]
        for link in links:
            by_kind.setdefault(common[0] if link.protocol == "nccl" else ETHERNET, []).append(link)
    nics = []
    for kind in own:
        nominal = [nic.bytes_per_second for nic in fact.nics if nic.kind == kind and nic.bytes_per_second]
        if kind in by_kind:
            nics.append(_channel(kind, _best(by_kind[kind]), by_kind[kind]))
        elif nominal:
            nics.append(Channel(kind, max(nominal)))
    return tuple(sorted(nics, key=lambda nic: -nic.bytes_per_second))


def _inside(kind: str, links: Sequence[MeasuredLink]) -> Channel:
    usual = INSIDE.get(kind)
    name = usual.kind if usual else "local" if kind.startswith("cpu") else "PCIe"
    if not links:
        return usual or Channel("PCIe", 15.75e9)  # there is one device, so the channel is not used
    pairs = dict.fromkeys(link.ranks for link in links)
    return _middle([_best(link for link in links if link.ranks == pair) for pair in pairs], name)


def _middle(links: Sequence[MeasuredLink], kind: str) -> Channel:
    ordered = sorted(links, key=lambda link: link.bytes_per_second)
    return _channel(kind, ordered[(len(ordered) - 1) // 2], links)


def _channel(kind: str, link: MeasuredLink, alike: Sequence[MeasuredLink]) -> Channel:
    """The bandwidth of ``link`` and the median latency of ``alike``, rounded to three digits, as more are noise."""
    latency = median_low(each.latency_seconds for each in alike)
    return Channel(kind, float(f"{link.bytes_per_second:.3g}"), float(f"{latency:.3g}"))


def _unique(names: Sequence[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        others = (f"{name}-{number}" for number in range(2, len(names) + 2))
        unique.append(next(each for each in (name, *others) if each not in unique))
    return unique
