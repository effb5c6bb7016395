"""Parts of the model's state that devices hold, what they lack for another plan, and decisions of a recovery."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.text import Text
from scipy.optimize import linear_sum_assignment

from ..checkpoint.exchange import BoxMemory, fetch_boxes
from ..checkpoint.pieces import Bitmap, Box, Location, RunState, StorageTier, TensorPiece, cover, whole
from ..checkpoint.transfers import Need, choose_sources
from ..common.ranks import of_every_rank
from ..planner.cluster.topology import Topology
from ..planner.cost.plan import Plan


class HeldLayers(NamedTuple):
    """Blocks on one device, with optimizer state, or tensor-parallel part ``part`` of ``parts`` of each."""

    ranges: tuple[tuple[int, int], ...]
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
            round(missing_bytes(held[rank], needed.get(place), block_bytes))
            if kinds[rank] == kinds[place]
            else math.inf
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
    state: RunState | None
    modes: dict[str, bool] = field(default_factory=dict)
    """``training`` of the model, with the name "", and of modules in which it is another."""
    frozen: frozenset[str] = frozenset()


# Versions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    version: int | None
    """Optimizer steps whose result a rank holds; None if it holds nothing, as one that has just started."""
    is_complete: bool  # True if it has all sums of gradients of the next step, so that it can make this step alone
    commit: Any  # agreement of the ranks on its last step; None before the first one
    evaluations: int = 0  # evaluations that all ranks have finished, as far as it knows
    has_results: bool | None = None  # True if it has the results of the evaluation that it is in; None if it is in none


class CatchUp(Enum):
    KEEP = "it has the newest state"
    STEP = "it makes the step that others have made"
    FORGET = "what it holds is too old, or nothing"


@dataclass(frozen=True)
class RecoveryDecision:
    version: int  # optimizer steps that are done, after each rank has followed its catch_up
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


# Evaluations ---------------------------------------------------------------------------------------------------------

# [Note: evaluations] An evaluation has no commit, so a message at its end keeps replicas together, as the commit does
# for steps. If a member is lost, a rank is either in the evaluation that others are in, or one ahead of them, because
# it has got the message of this one; then all have its results, and ranks that are behind go on with them. The others
# evaluate their batch again, unless all are in the same evaluation and have its results. A process that joins meanwhile
# is in no evaluation, and would train alone.


class Evaluations:
    done = 0  # evaluations that all ranks have finished, as far as this rank knows
    has_results: bool | None = None  # of the passes of the present evaluation; None outside

    def run(
        self,
        evaluate: Callable[[Iterator[Any]], dict],
        batches: Iterator[Any],
        change: Callable[[RuntimeError], bool],
    ) -> dict:
        """Evaluate the next batch; returns what ``evaluate`` returns."""
        drawn: list[Any] = []
        result: dict = {}
        self.has_results = False
        while True:
            try:
                if not self.has_results:
                    result = evaluate(_drawing(batches, drawn))
                    self.has_results = True
                dist.barrier()
                break
            except RuntimeError as error:
                failure = error
            with torch.inference_mode(False), torch.enable_grad():
                self.has_results = not change(failure)
            if self.has_results:
                break
        self.done, self.has_results = self.done + 1, None
        return result


def has_to_repeat(own: Standing, standings: Sequence[Standing]) -> bool:
    furthest = max(each.evaluations for each in standings)
    if own.has_results is None or own.evaluations < furthest:
        return False
    return not all(each.has_results and each.evaluations == furthest for each in standings)


def is_joined_inside(standings: Sequence[Standing]) -> bool:
    """True if ranks of the new world are in an evaluation, and others have just joined, which are not."""
    has_new = any(each.version is None for each in standings)
    return has_new and any(each.version is not None and each.has_results is not None for each in standings)


def _drawing(batches: Iterator[Any], drawn: list[Any]) -> Iterator[Any]:
    yield from tuple(drawn)
    for batch in batches:
        drawn.append(batch)
        yield batch


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
    kept: set[int] = set()
    for node in cluster.nodes:
        count = members[node.name]
        if count > len(node.devices):
            raise ValueError(
                f"node {node.name} has {len(node.devices)} devices in the cluster file, but {count} members; start at "
                "most one for each device"
            )
        kept.update(node.devices[:count])
    there = cluster.of_devices(kept)
    assert list(nodes) == [there.nodes[each.node].name for each in there.devices], "members are in the cluster's order"
    return there


# Recovery ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """A change of the world from ``before`` to ``after`` members."""

    version: int
    before: int
    after: int
    seconds: float
    received_bytes: int
    iterations_repeated: int  # 1 if the passes since the last step are run once more, else 0
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


# Moves between memories ----------------------------------------------------------------------------------------------

COPIES = 2  # ranks that take what a leaving member holds


class HoldingsLost(Exception):
    """No rank has some elements any more."""


class HeldBox(NamedTuple):
    """A box of a tensor of shape ``shape`` that a rank has in its memory."""

    layer: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    box: Box


def all_holdings(held: Iterable[TensorPiece]) -> list[list[HeldBox]]:
    """Boxes that each rank holds. Every rank calls it, with its own pieces."""
    return of_every_rank(
        [
            HeldBox(each.layer, each.key, tuple(each.shape), str(each.data.dtype).removeprefix("torch."), each.box)
            for each in held
        ]
    )


def inheritance(holdings: Sequence[Sequence[HeldBox]], leaving: Sequence[bool]) -> list[list[HeldBox]]:
    """Boxes that each rank takes from leaving ones: then :data:`COPIES` ranks hold them, in case another member dies.

    Ranks that lack the fewest elements of a box take these; of several, the one that has taken the fewest so far.
    """
    kept: dict[tuple[int, str], list[Box]] = {}
    stayers = [rank for rank, leaves in enumerate(leaving) if not leaves]
    for rank in stayers:
        for each in holdings[rank]:
            kept.setdefault((rank, each.key), []).append(each.box)
    taken: list[list[HeldBox]] = [[] for _ in holdings]
    elements = dict.fromkeys(stayers, 0)
    for each in (each for rank, leaves in enumerate(leaving) if leaves for each in holdings[rank]):
        lacking = {rank: cover(each.box, kept.get((rank, each.key), []))[1] for rank in stayers}
        sizes = {rank: sum(box.numel for box in boxes) for rank, boxes in lacking.items()}
        for heir in sorted(stayers, key=lambda rank: (sizes[rank], elements[rank], rank))[:COPIES]:
            taken[heir] += [each._replace(box=box) for box in lacking[heir]]
            elements[heir] += sizes[heir]
            kept.setdefault((heir, each.key), []).extend(lacking[heir])
    return taken


def empty_piece(holding: HeldBox) -> TensorPiece:
    data = torch.empty(holding.box.sizes, dtype=getattr(torch, holding.dtype))
    return TensorPiece(holding.layer, holding.key, holding.shape, holding.box, data, "")


def move_pieces(
    needed: Sequence[TensorPiece], held: Sequence[TensorPiece], holdings: Sequence[Sequence[HeldBox]]
) -> int:
    """Fill the needed pieces of this rank from what all ranks hold; returns the bytes received. Every rank calls it.

    What a rank holds itself is copied, other elements come from the rank that gives the fewest bytes. One layer after
    the other is on its way, so that memory for few layers is needed.
    """
    node_of = {number: str(number) for number in range(len(holdings))}
    bitmap, shapes, dtypes = _bitmap(holdings)
    needs = of_every_rank([Need(each.layer, each.key, each.box, each.data.element_size()) for each in needed])
    try:
        fetches = choose_sources(dict(enumerate(needs)), node_of, bitmap)
    except LookupError:
        raise HoldingsLost(", ".join(dict.fromkeys(_incomplete(holdings)))) from None
    sources: dict[str, list[TensorPiece]] = {}
    for piece in held:
        sources.setdefault(piece.key, []).append(piece)
    outcome = fetch_boxes(fetches, node_of, BoxMemory(needed, shapes, dtypes), partial(_copy, held=sources))
    assert not outcome.left and not outcome.problems
    return outcome.received_bytes


def _incomplete(holdings: Sequence[Sequence[HeldBox]]) -> Iterator[str]:
    boxes: dict[tuple[str, str, tuple[int, ...]], set[Box]] = {}
    for each in itertools.chain.from_iterable(holdings):
        boxes.setdefault((each.layer, each.key, each.shape), set()).add(each.box)
    return (layer for (layer, _, shape), held in boxes.items() if cover(whole(shape), sorted(held))[1])


def _bitmap(holdings: Sequence[Sequence[HeldBox]]) -> tuple[Bitmap, dict[str, tuple[int, ...]], dict[str, str]]:
    bitmap, shapes, dtypes = Bitmap(), {}, {}
    for rank, of_rank in enumerate(holdings):
        for each in of_rank:
            bitmap.add(each.layer, each.key, each.box, Location(str(rank), StorageTier.MEMORY))
            shapes[each.key], dtypes[each.key] = each.shape, each.dtype
    return bitmap, shapes, dtypes


def _copy(targets: Sequence[TensorPiece], held: Mapping[str, Sequence[TensorPiece]]) -> None:
    for target in targets:
        sources = held[target.key]
        parts, left = cover(target.box, [piece.box for piece in sources])
        assert not left, target
        for index, part in parts:
            source = sources[index]
            target.data[target.box.slices_of(part)].copy_(source.data[source.box.slices_of(part)])
