"""Planning again while training: from the measured times of stages and links, for the same devices (ADAPT, chapter 6).

[Note: following speeds] A stage's measured time over its planned time says how much slower its devices are than the
plan assumed. Two windows of iterations in a row have to show the same change, beyond the noise, before a plan is looked
for; and the model moves only if the new plan gains enough, and over :data:`HORIZON` iterations more than the move
costs. If iterations become longer by it, layers move back. See :class:`Caution` for what keeps layers from moving to
and fro.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

from ...common.text import times
from ..cluster.topology import Topology
from ..cost.draft import DraftBuilder, write_plan
from ..cost.layout_line import layout_of
from ..cost.placed_pipelines import PlacedPipelines
from ..cost.plan import Plan
from ..cost.price import Pricer, price, slots_of
from ..cost.runnable import NoPlanError
from ..profile.layer_profile import ModelProfile

WINDOW = 4  # iterations whose medians are compared: one that is disturbed does not count
CHANGED = 0.1
"""Relative change of the times of stages to each other that counts. Windows of two undisturbed stages on a CPU differed
by up to 0.08."""
GAIN = 0.05
"""Least share by which a plan that is moved to must be faster; the predictions of two plans are about as exact."""
HORIZON = 200  # iterations in which a move must bring more than it costs
CALM = 50  # steps; see :class:`Caution`
SPEED_STEP = 1.03
"""Measured speeds are rounded to powers of it, so that noise does not make devices unequal that are equal."""
LINK_CHANGED = 2.0
"""Factor by which the time of messages must differ from the plan's to count. That of small ones is mostly latency."""
MOVE_SECONDS = 1.0
"""Time of a move beside its transfers, before the first one is measured: on two cores, a ViT of 8 blocks took 0.2 to
0.7 s."""

ByStage = Mapping[tuple[int, ...], float]
"""A value for each stage, by its ranks."""


@dataclass(frozen=True)
class LinkDrift:
    """What messages between two ranks took, beside the plan."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]
    message_bytes: float
    seconds: float  # of one message in one direction
    planned_seconds: float
    matters: bool  # False where the difference is less than 5 % of an iteration (:data:`GAIN`), or than a factor of 2

    @property
    def changed(self) -> bool:
        return _differ(self.seconds, self.planned_seconds)

    def shows_more_than(self, share: float, latency_seconds: float) -> bool:
        """True if it has not changed, and would have with this share of the bandwidth."""
        slowed = latency_seconds + (self.planned_seconds - latency_seconds) / share
        return not self.changed and _differ(slowed, self.planned_seconds)

    @property
    def ratio(self) -> float:
        """Measured time over the planned one, if it matters; else 1."""
        return self.seconds / self.planned_seconds if self.matters else 1.0

    def __str__(self) -> str:
        unit, (measured,), (planned,) = times([self.seconds], [self.planned_seconds])
        return (
            f"the link between rank {self.ranks[0]} on {self.nodes[0]} and rank {self.ranks[1]} on {self.nodes[1]} "
            f"takes {measured} {unit} for a message of {self.message_bytes / 1e6:.2g} MB, planned {planned} {unit}"
        )


def _differ(seconds: float, planned_seconds: float) -> bool:
    return max(seconds / planned_seconds, planned_seconds / seconds) > LINK_CHANGED


class LastingChange:
    """Tells a change of speeds that lasts from noise. Pure state: it sees the ratios of one window after the other.
    What has changed by ``least`` beside something else has changed; what a window has no ratio of, is not certain."""

    def __init__(self, least: float = 1 + CHANGED) -> None:
        self._least = math.log(least)
        self._known: dict[tuple[int, ...], float] = {}
        self._before: dict[tuple[int, ...], float] | None = None

    def is_certain(self, ratios: ByStage) -> bool:
        """Note the ratios of a window; true if this and the last one differ alike from those that are known."""
        before, self._before = self._before, self._change(ratios)
        pairs = [(each, (before or {}).get(ranks, 0.0)) for ranks, each in self._before.items()]
        return self._is_change(min(pair, key=abs) if pair[0] * pair[1] > 0 else 0.0 for pair in pairs)

    def is_suspected(self, ratios: ByStage) -> bool:
        """True if this window alone differs from those that are known."""
        return self._is_change(self._change(ratios).values())

    def _change(self, ratios: ByStage) -> dict[tuple[int, ...], float]:
        return {ranks: math.log(ratio) - self._known.get(ranks, 0.0) for ranks, ratio in ratios.items()}

    def _is_change(self, changes: Iterable[float]) -> bool:
        changes = [*changes]
        return max(changes, default=0.0) - min(changes, default=0.0) > self._least

    def settle(self, ratios: ByStage) -> None:
        """Take these ratios for known: later ones are compared with them. After a move, it is none."""
        self._known = {ranks: math.log(ratio) for ranks, ratio in ratios.items()}
        self._before = None


class Caution:
    """Least share by which the next move has to gain. A move that has brought less than half of what was predicted, or
    that goes back to cuts that were left less than :data:`HORIZON` steps ago, doubles it; it halves as often as
    :data:`CALM` steps pass without one. Cuts with which iterations were longer are left out for :data:`HORIZON`."""

    def __init__(self) -> None:
        self._raised, self._since = GAIN, 0
        self._left: dict[object, int] = {}
        self._worse: dict[object, int] = {}

    def least_gain(self, step: int) -> float:
        return max(GAIN, self._raised * 0.5 ** ((step - self._since) // CALM))

    def disappointed(self, step: int) -> None:
        self._raised, self._since = 2 * self.least_gain(step), step

    def moved(self, before: object, after: object, step: int) -> None:
        self._raised, self._since = self.least_gain(step), step
        if step - self._left.get(after, -HORIZON) < HORIZON:
            self.disappointed(step)
        self._left[before] = step

    def taken_back(self, cuts: object, step: int) -> None:
        """Note that iterations were longer with these ``cuts`` than before."""
        self._worse[cuts] = step

    def allows(self, cuts: object, step: int) -> bool:
        return step - self._worse.get(cuts, -HORIZON) >= HORIZON


@dataclass(frozen=True)
class Proposal:
    """The best plan that was found for the measured speeds."""

    plan: Plan
    present_seconds: float  # predicted time of an iteration with the present plan, at these speeds
    topology: Topology  # the machines with these speeds

    @property
    def gain(self) -> float:
        """Share by which an iteration is shorter; 0 or less if no plan is faster than the present one."""
        return 1.0 - self.plan.iteration_seconds / self.present_seconds

    def pays(self, cost_seconds: float, least_gain: float) -> bool:
        saved = self.present_seconds - self.plan.iteration_seconds
        return self.gain >= least_gain and saved * HORIZON > cost_seconds


def at_measured_speeds(topology: Topology, ratios: ByStage) -> Topology:
    factors = {rank: _rounded(ratio) for ranks, ratio in ratios.items() for rank in ranks}
    devices = tuple(
        dataclasses.replace(device, speed=device.speed / factors.get(rank, 1.0))
        for rank, device in enumerate(topology.devices)
    )
    return dataclasses.replace(topology, devices=devices)


def at_measured_links(topology: Topology, links: Sequence[LinkDrift]) -> Topology:
    """The machines with links between nodes as fast as measured, where that matters: cards change of the node that has
    no other link as fast as planned, or else of both."""
    nodes, between = list(topology.nodes), list(topology.between)
    for link in sorted((each for each in links if each.matters), key=lambda each: each.ratio):
        (one, other), kind = _way(topology, link)
        channel = topology.node_channel(one, other)
        latency = channel.latency_seconds
        share = (link.planned_seconds - latency) / max(link.seconds - latency, 0.1 * link.seconds)
        fine = {
            node
            for each in links
            for ends, of_kind in [_way(topology, each)]
            if of_kind == kind and each.shows_more_than(share, topology.node_channel(*ends).latency_seconds)
            for node in ends
        }
        clusters = {nodes[one].cluster, nodes[other].cluster}
        joined = [number for number, link in enumerate(between) if {*link[:2]} == clusters]
        if joined:
            found = channel.with_bandwidth(share * channel.bytes_per_second)
            between[joined[0]] = (*between[joined[0]][:2], found)
        else:
            for node in {one, other} - fine or {one, other}:
                nics = [
                    nic.with_bandwidth(share * channel.bytes_per_second) if nic.kind == kind else nic
                    for nic in nodes[node].nics
                ]
                nics.sort(key=lambda nic: -nic.bytes_per_second)
                nodes[node] = dataclasses.replace(nodes[node], nics=tuple(nics))
    return dataclasses.replace(topology, nodes=tuple(nodes), between=tuple(between))


def _way(topology: Topology, link: LinkDrift) -> tuple[tuple[int, int], str]:
    """The nodes of a link, and the kind of network between them."""
    one, other = (topology.devices[rank].node for rank in link.ranks)
    return (one, other), topology.node_channel(one, other).kind


def _on_its_networks(measured: Topology, topology: Topology, links: Iterable[LinkDrift]) -> Topology:
    """The machines if the present run's groups go on with the networks that they use."""
    nodes = list(measured.nodes)
    for ways, kind in (_way(topology, link) for link in links if link.matters):
        for node in ways:
            nics = tuple(nic for nic in nodes[node].nics if nic.kind == kind)
            nodes[node] = dataclasses.replace(nodes[node], nics=nics)
    return dataclasses.replace(measured, nodes=tuple(nodes))


def _rounded(ratio: float) -> float:
    step = math.log(SPEED_STEP)
    return math.exp(round(math.log(ratio) / step) * step)


def propose(
    topology: Topology,
    profile: ModelProfile,
    plan: Plan,
    seconds: ByStage,
    links: Sequence[LinkDrift] = (),
    idle: ByStage = MappingProxyType({}),
    *,
    alike: bool,
    search: Callable[[Topology], Plan] | None = None,
) -> Proposal | None:
    """The best plan for devices as fast as stages of ``plan`` show; None if none is known to fit in memory.

    Args:
        topology: the machines, with kinds of devices that ``profile`` has times of; it has no ``rank_devices``.
        seconds: measured time of each stage per micro-batch, without transfers.
        links: all measured links; groups of ranks change their network only with a plan.
        idle: of ranks that ``plan`` leaves idle, how many times slower they are than in ``topology``.
        alike: replicas stay alike, with their numbers of micro-batches.
        search: a function that finds any plan for other machines; None: ranks keep their places, and only cuts move.
    """
    given = topology, profile, layout_of(plan), plan.rank_order
    stages = [stage for replica in price(*given).replicas for stage in replica.stages]
    planned = {stage.ranks: stage.forward_seconds + stage.backward_seconds for stage in stages}
    ratios = {ranks: each / planned[ranks] for ranks, each in seconds.items()}
    measured = at_measured_speeds(topology, {**ratios, **idle})
    measured = at_measured_links(measured, links)
    try:
        present = price(_on_its_networks(measured, topology, links), *given[1:])
    except ValueError:  # one of the nodes has no other link to a third one
        present = price(measured, *given[1:])
    found = [recut(measured, profile, plan, alike=alike)]
    if search is not None:
        with suppress(NoPlanError):
            found.append(search(measured))
    plans = [each for each in found if each is not None]
    if not plans:
        return None
    best = min(plans, key=lambda each: each.iteration_seconds)
    names = {"cluster": plan.cluster, "profile": plan.profile}
    return Proposal(best.model_copy(update=names), present.iteration_seconds, measured)


def recut(topology: Topology, profile: ModelProfile, plan: Plan, *, alike: bool) -> Plan | None:
    """The 1F1B plan with the same ranks in the same stages and the best cuts; None if none fits. Unless ``alike``, each
    replica has its own cuts and number of micro-batches."""
    layout = layout_of(plan)
    pricer = Pricer(topology, profile, layout, slots_of(topology, plan.rank_order, plan.tensor_parallel))
    rows, builder = pricer.rows(plan.rank_order), DraftBuilder(topology, "exact")
    placed = PlacedPipelines(builder, pricer.pool)
    drafts = [placed.best(rows, math.inf)] if plan.symmetric else []
    if not alike:
        drafts.append(placed.best_unequal(rows, math.inf))
    found = [draft for draft in drafts if draft is not None]
    if not found:
        return None
    return write_plan(min(found, key=lambda draft: draft.seconds), topology, profile, plan.method)


def move_seconds(received_bytes: Sequence[float], topology: Topology) -> float:
    """Time in which each rank receives so many bytes, by the slowest channel that one may come over."""
    between = [channel.bytes_per_second for *_, channel in topology.between]
    slowest = min(
        [*between, *(channel.bytes_per_second for node in topology.nodes for channel in node.nics[:1])]
        or [node.inside.bytes_per_second for node in topology.nodes]
    )
    return max(received_bytes, default=0.0) / slowest
