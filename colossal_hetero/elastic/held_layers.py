"""Parts of the model's state that devices hold, what they lack for another plan, and decisions of a recovery."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text
from scipy.optimize import linear_sum_assignment

from ..checkpoint.pieces import RunState, TensorPiece
from ..planner.cluster.topology import Device, Node, Topology
from ..planner.cost.plan import Plan


class HeldLayers(NamedTuple):
    """Blocks on one device, with optimizer state, or tensor-parallel part ``part`` of ``parts`` of each."""

    ranges: tuple[tuple[int, int], ...]
    """Ranges ``[a, b)`` of blocks."""
    part: int = 0
    parts: int = 1


def layers_by_rank(plan: Plan) -> dict[int, HeldLayers]:
    return {
        rank: HeldLayers(stage.block_ranges, part, len(stage.ranks))
        for replica in plan.replicas
        for stage in replica.stages
        for part, rank in enumerate(stage.ranks)
    }


def missing_bytes(held: HeldLayers | None, needed: HeldLayers | None, block_bytes: Sequence[float]) -> float:
    """Bytes that a device must get for what is ``needed`` on it, if it holds ``held``."""
    if needed is None:
        return 0.0
    total = sum(sum(block_bytes[start:stop]) for start, stop in needed.ranges) / needed.parts
    if held is None:
        return total
    start = max(needed.part / needed.parts, held.part / held.parts)
    stop = min((needed.part + 1) / needed.parts, (held.part + 1) / held.parts)
    kept = sum(block_bytes[block] for block in _blocks(needed) & _blocks(held)) * max(stop - start, 0.0)
    return max(total - kept, 0.0)


def _blocks(layers: HeldLayers) -> set[int]:
    return {block for start, stop in layers.ranges for block in range(start, stop)}


# Fewest bytes -------------------------------------------------------------------------------------------------------


def with_fewest_moves(
    plan: Plan, topology: Topology, held: Sequence[HeldLayers | None], block_bytes: Sequence[float]
) -> Plan:
    """The plan with the fewest bytes to move of those with the same predictions, in which alike devices change places.

    SciPy's Hungarian algorithm finds it. Devices are alike if they are in one node, or in one-device nodes with the
    same network cards.
    """
    needed, ranks = layers_by_rank(plan), range(len(held))
    kinds = [_kind(topology, rank) for rank in ranks]
    costs = [
        [
            round(missing_bytes(held[rank], needed[place], block_bytes)) if kinds[rank] == kinds[place] else math.inf
            for place in ranks
        ]
        for rank in ranks
    ]
    rows, columns = linear_sum_assignment(np.array(costs))
    rank_at = dict(zip(columns.tolist(), rows.tolist(), strict=True))
    replicas = tuple(
        replica.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(
                        update={
                            "ranks": tuple(rank_at[place] for place in stage.ranks),
                            "node": topology.nodes[topology.devices[rank_at[stage.ranks[0]]].node].name,
                        }
                    )
                    for stage in replica.stages
                )
            }
        )
        for replica in plan.replicas
    )
    return plan.model_copy(update={"replicas": replicas})


def _kind(topology: Topology, rank: int) -> Hashable:
    device = topology.devices[rank]
    node = topology.nodes[device.node]
    place: Hashable = device.node if len(node.devices) > 1 else (node.cluster, node.nics)
    return device.kind, device.speed, place


# Held state ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    pieces: list[TensorPiece]
    kinds: dict[str, str]
    """See :func:`.optimizer_memory.state_entries`."""
    state: RunState | None
    modes: dict[str, bool] = field(default_factory=dict)
    """``training`` of the model, with the name "", and of modules in which it is another."""
    frozen: frozenset[str] = frozenset()
    """Names of parameters without gradients."""


# Versions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    version: int | None
    """Optimizer steps whose result a rank holds; None if it holds nothing, as one that has just started."""
    is_complete: bool
    """True if it has all sums of gradients of the next step, so that it can make this step alone."""
    commit: Any
    """Agreement of the ranks on its last step; None before the first one."""
    evaluations: int = 0
    """Evaluations that all ranks have finished, as far as it knows."""
    has_results: bool | None = None
    """True if it has the results of the evaluation that it is in; None if it is in none."""


class CatchUp(Enum):
    KEEP = "it has the newest state"
    STEP = "it makes the step that others have made"
    FORGET = "what it holds is too old, or nothing"


@dataclass(frozen=True)
class RecoveryDecision:
    version: int
    """Optimizer steps that are done, after each rank has followed its catch_up."""
    commit: Any
    catch_ups: tuple[CatchUp, ...]


def agree(standings: Sequence[Standing]) -> RecoveryDecision | None:
    """Choose the newest state, and what each rank does; None if no rank holds anything.

    A step is made only by ranks that have the commit, and a commit exists only if every rank had complete sums. So a
    rank that is one step behind either is complete, or it was not a member when the others made the step.
    """
    newest = max((each for each in standings if each.version is not None), key=_version, default=None)
    if newest is None:
        return None
    version = _version(newest)

    def catch_up(each: Standing) -> CatchUp:
        if each.version == version:
            return CatchUp.KEEP
        behind = each.version is not None and each.version == version - 1
        return CatchUp.STEP if behind and each.is_complete else CatchUp.FORGET

    return RecoveryDecision(version, newest.commit, tuple(map(catch_up, standings)))


def _version(standing: Standing) -> int:
    assert standing.version is not None
    return standing.version


# Survivors -----------------------------------------------------------------------------------------------------------


def surviving_topology(cluster: Topology, nodes: Sequence[str]) -> Topology:
    """Part of a cluster with one device for each member; devices are numbered like ranks."""
    members = Counter(nodes)
    unknown = sorted(members.keys() - {node.name for node in cluster.nodes})
    if unknown:
        raise ValueError(
            f"node {', '.join(unknown)} is not in the cluster file, which has "
            f"{', '.join(node.name for node in cluster.nodes)}; add it there, or start it with one of these names"
        )
    devices: list[Device] = []
    kept: list[Node] = []
    for number, node in enumerate(cluster.nodes):
        count = members[node.name]
        if count > len(node.devices):
            raise ValueError(
                f"node {node.name} has {len(node.devices)} devices in the cluster file, but {count} members; start at "
                "most one for each device"
            )
        if not count:
            continue
        first = len(devices)
        devices += [dataclasses.replace(cluster.devices[device], node=len(kept)) for device in node.devices[:count]]
        kept.append(dataclasses.replace(node, devices=tuple(range(first, len(devices)))))
        assert nodes[first] == node.name == cluster.nodes[number].name, "members are in the order of the cluster"
    return dataclasses.replace(cluster, devices=tuple(devices), nodes=tuple(kept))


# Recovery ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """A change of the world from ``before`` to ``after`` members."""

    version: int
    before: int
    after: int
    seconds: float
    received_bytes: int
    """Bytes received by this rank."""
    iterations_repeated: int
    """1 if the passes since the last step are run once more, else 0."""
    reason: str

    def in_words(self) -> str:
        """Text for the terminal, of rank 0, and for the log, of every rank."""
        lost = f"iteration {self.version + 1} is done again" if self.iterations_repeated else "nothing is lost"
        return (
            f"{self.before} members became {self.after} after step {self.version}: {self.reason}; {lost}; "
            f"{self.seconds:.1f} s, {self.received_bytes / 1e6:.1f} MB received by this rank"
        )


@dataclass(frozen=True)
class Recoveries:
    """All recoveries of a run, as a part of a report."""

    recoveries: tuple[Recovery, ...]

    def shown(self) -> Iterator[Text]:
        return (Text(each.in_words()) for each in self.recoveries)

    def numbers(self) -> dict[str, float]:
        return {"count": len(self.recoveries), "latest_seconds": self.recoveries[-1].seconds}
