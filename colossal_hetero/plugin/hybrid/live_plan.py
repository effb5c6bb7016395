"""A plan that follows the speeds of devices: layers move between ranks while training.

[Note: moves] The passes of a step begin with a look at what the stages took, see [Note: following speeds] in
``planner/solver/follow.py``. If another plan pays, all ranks, in this order:

1. Take their tensors out of the model and the optimizer; the script keeps both objects.
2. Build the plugin for the other plan, with the process groups that exist already.
3. Configure the model again, with weights that are zero.
4. Fill it from what all ranks hold. What a rank held before is copied, the rest comes from its nearest holder.

Balancing inside stages reacts first: it needs one iteration, and what is left of a stage's time after it is what the
stage shows here in two windows.
"""

from __future__ import annotations

import gc
import itertools
import logging
import math
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...checkpoint.run_states import random_state_of, restore_process
from ...colossalai_support.corrections import OWN_PACKAGES, is_from
from ...common.methods import wrap_method
from ...common.ranks import from_rank_0, of_every_rank, print_on_rank_0
from ...common.text import duration, spans
from ...data_parallel.loader import HeteroDataLoader
from ...elastic.held_layers import layers_by_rank, missing_bytes
from ...planner.cluster.group_networks import Network, group_network
from ...planner.cluster.topology import Topology
from ...planner.cost.layout_line import layout_of
from ...planner.cost.plan import Plan
from ...planner.cost.runnable import NoPlanError
from ...planner.solver.follow import (
    CHANGED,
    GAIN,
    LINK_CHANGED,
    MOVE_SECONDS,
    WINDOW,
    ByStage,
    Caution,
    LastingChange,
    LinkDrift,
    Proposal,
    move_seconds,
)
from ...profiling.preserved_state import inner_optimizer
from ..elastic.planning import seated
from ..elastic.session import HOOKS, Session, release_state, restore
from ..plan_config import PlanConfig
from ..training_objects import TrainingObjects
from .drift import DriftReport, IdleClock, split_in_words
from .plan_agreement import best_plan
from .planned_mesh import MakeGroup

log = logging.getLogger(__name__)

LIBRARIES = (*OWN_PACKAGES, "torch")
SLOW = 2.0  # times that a stage takes longer than another one from which on a plan without its devices is looked for


Search = Callable[..., Plan]
"""Finds a plan for machines, and if ``all_devices=False`` one that may leave some idle."""


@dataclass(frozen=True)
class PlanChange:
    """A move of layers to other ranks while training."""

    step: int
    """Optimizer steps before it."""
    before: Plan
    after: Plan
    before_seconds: float
    """Predicted time of an iteration with the plan before, at the speeds that were measured."""
    seconds: float
    """Time of the move."""
    received_bytes: int
    """The most that one rank received."""
    is_back: bool = False
    """True if iterations were longer after the move before; then times are measured, and not predicted."""

    def in_words(self) -> str:
        now, then = duration(self.after.iteration_seconds), duration(self.before_seconds)
        splits = split_in_words(self.before), split_in_words(self.after)
        held = layers_by_rank(self.before), layers_by_rank(self.after)
        what = f"{splits[0]} became {splits[1]}"
        if layout_of(self.before) == layout_of(self.after) and held[0] == held[1]:
            what = f"stayed {splits[1]}, and groups of ranks use other networks"
        idle, returned = (sorted(one.keys() - other.keys()) for one, other in itertools.permutations(held))
        who = "".join(
            f"; rank{'s' if len(ranks) > 1 else ''} {spans(ranks)} {what_now}"
            for ranks, what_now in ((idle, "idle from now on"), (returned, "back"))
            if ranks
        )
        return (
            f"after step {self.step}, layers {what}{' again' * self.is_back}: {now} "
            f"instead of {then} per iteration {'were measured' if self.is_back else 'are predicted'}; it took "
            f"{duration(self.seconds)}, and a rank received up to {self.received_bytes / 1e6:.1f} MB{who}"
        )


@dataclass(frozen=True)
class _Trial:
    """What rank 0 knows of a run before a move."""

    plan: Plan
    topology: Topology
    iteration_seconds: float
    expected_seconds: float  # after the move, if it brings half of what is predicted


class LivePlan:
    """Moves the layers of the one model that a hybrid ``plugin`` trains; see [Note: moves]."""

    def __init__(self, plugin: Any, arguments: Mapping[str, Any]) -> None:
        self.changes: list[PlanChange] = []
        self._plugin, self._arguments = plugin, arguments
        self._groups: dict[tuple[tuple[int, ...], Network | None], Any] = {}
        self._session: Session | None = None
        self._hooks: list[tuple[str, object]] = []
        self._obstacle: str | None = None
        self._is_moving = self._is_boundary = False
        self._shards = False  # the first plan uses ZeRO
        self._steps = 0
        self._evidence, self._of_links = LastingChange(), LastingChange(LINK_CHANGED)
        self._waits = False  # for certainty about a link, for one window
        self._links: dict[tuple[int, int], LinkDrift] = {}  # as last measured when a plan was looked for
        self._seen: DriftReport | None = None
        self._told: set[tuple[int, ...]] = set()  # ranks that had better be left out
        self.idle_clock: IdleClock | None = None  # of this rank, if the present plan leaves it idle
        self._caution, self._fixed_seconds = Caution(), MOVE_SECONDS
        self._ends: deque[float] = deque(maxlen=WINDOW + 1)  # of the last steps
        self._is_on_trial = False  # the last move was not judged yet
        self._trial: _Trial | None = None  # of rank 0

    @property
    def _run(self) -> Any:
        """The plugin's :class:`.PlannedRun`."""
        return self._plugin._planned

    def idle_ranks(self, plan: Plan) -> tuple[int, ...]:
        """Ranks that ``plan`` leaves idle; the first plan needs all ranks that were started."""
        return _idle_ranks(plan) if self._is_moving else ()

    def kept_groups(self, make_group: MakeGroup, topology: Topology) -> MakeGroup:
        """``make_group``, which makes each group once for each network. All ranks ask for the same groups."""

        def kept(ranks: tuple[int, ...]) -> Any:
            network: Network | None = None
            with suppress(ValueError):  # the first and the last stage may have no link
                network = group_network(topology, ranks)
            key = ranks, network
            if key not in self._groups:
                self._groups[key] = make_group(ranks)
            return self._groups[key]

        return kept

    # The plugin's moments -----------------------------------------------------------------------------------------

    def note(self, objects: TrainingObjects) -> None:
        if self._is_moving or objects.optimizer is None:
            return
        if self._session is not None:
            self._obstacle = "the plugin trains several models"
            return
        self._session = Session(objects)

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        assert self._session is not None
        if self._session.objects is None:
            self._session.objects = objects
            self._shards = bool(self._run.plan.zero_stage)
        self._hooks = list(_hooks_of(objects.model))
        self._group_sizes = _group_sizes(objects.optimizer)
        self._is_boundary = False
        wrap_method(objects.optimizer, "step", self._step)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        self._steps, self._is_boundary = self._steps + 1, True
        self._ends.append(time.monotonic())
        return result

    def before_passes(self) -> None:
        """Look at the stages' times, and move layers if that pays. Every rank calls it before the passes of a batch."""
        is_boundary, self._is_boundary = self._is_boundary, False
        report = self._plugin.drift
        if not is_boundary or self._obstacle is not None or report is None or report is self._seen:
            return
        self._seen = report
        ratios = {stage.ranks: stage.ratio for stage in report.stages} | {**report.idle}
        iteration = _iteration_seconds(self._ends)
        if self._is_on_trial:
            self._is_on_trial = False
            back = from_rank_0(lambda: self._judged(iteration, [stage.ratio for stage in report.stages]))
            if back is not None and self._may_move():
                self._move(back, is_back=True)
                return
        if dist.get_rank() == 0:
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios.values())
            log.debug("after step %d, stages take %s of the planned time", self._steps, shown)
            for link in report.links:
                log.debug("%s", link)
        links: ByStage = {link.ranks: link.ratio for link in report.links} | {(): 1.0}
        stages_have_changed, suspected = self._evidence.is_certain(ratios), self._of_links.is_suspected(links)
        if self._of_links.is_certain(links):
            for link in report.links:
                if self._of_links.is_suspected({link.ranks: link.ratio, (): 1.0}):
                    print_on_rank_0(f"after step {self._steps}, {link}")
        elif not stages_have_changed or (suspected and not self._waits):
            self._waits = stages_have_changed  # the next window tells whether the link has changed, too
            return
        self._waits = False
        self._links |= {link.ranks: link for link in report.links}
        known = replace(report, links=tuple(self._links.values()))
        proposal = from_rank_0(lambda: self._paying(known, iteration))
        self._evidence.settle(ratios)
        self._of_links.settle({link.ranks: link.ratio for link in known.links})
        if proposal is None or not self._may_move():
            return
        self._move(proposal)

    # Decisions ----------------------------------------------------------------------------------------------------

    def _judged(self, iteration: float | None, ratios: Sequence[float]) -> Proposal | None:
        """The plan before the last move, if iterations are longer since then, unless a stage has become much slower
        meanwhile. Ask for more of the next move if this one has not brought half of what was predicted."""
        trial, self._trial = self._trial, None
        if trial is None or iteration is None:
            return None
        if iteration >= trial.expected_seconds:
            self._caution.disappointed(self._steps)
        if iteration < (1 + CHANGED) * trial.iteration_seconds or max(ratios) > SLOW * min(ratios):
            return None
        self._caution.taken_back(layout_of(self._run.plan), self._steps)
        plan = trial.plan.model_copy(update={"iteration_seconds": trial.iteration_seconds})
        return Proposal(plan, iteration, trial.topology)

    def _paying(self, report: DriftReport, iteration: float | None) -> Proposal | None:
        search, least = self._search(), self._caution.least_gain(self._steps)
        proposal = self._run.propose(report, search)
        if proposal is not None:
            proposal = self._without_slow_ranks(report, proposal, search)
            words = split_in_words(proposal.plan), 100 * proposal.gain, 100 * least
            log.debug("layers %s gain %.1f %%, and %.1f %% are needed", *words)
        if proposal is None or not proposal.pays(self._cost(proposal, iteration or 0.0), least):
            return None
        if not self._caution.allows(layout_of(proposal.plan), self._steps):
            return None
        if iteration is not None:
            expected = iteration * (1 - proposal.gain / 2)
            self._trial = _Trial(self._run.plan, proposal.topology, iteration, expected)
        return proposal

    def _without_slow_ranks(self, report: DriftReport, proposal: Proposal, search: Search | None) -> Proposal:
        """The proposal, or one that leaves slow ranks idle if it is faster."""
        ratios = [stage.ratio for stage in report.stages]
        if max(ratios) < SLOW * min(ratios) and not report.idle:
            return proposal
        with suppress(NoPlanError):
            best = (search or self._any_plan)(proposal.topology, all_devices=False)
            idle = _idle_ranks(best)
            now, then = (each.iteration_seconds for each in (proposal.plan, best))
            if not idle or then >= (1 - GAIN) * now:
                return proposal
            obstacle = self._why_not_idle(idle, search)
            if obstacle is None:
                return replace(proposal, plan=best)
            if idle not in self._told:
                self._told.add(idle)
                print_on_rank_0(
                    f"after step {self._steps}, a plan without rank{'s' * (len(idle) > 1)} {spans(idle)} is faster: "
                    f"{duration(then)} instead of {duration(now)} per iteration are predicted. {obstacle}; if that "
                    "stays so, start again on the other devices"
                )
        return proposal

    def _why_not_idle(self, idle: tuple[int, ...], search: Search | None) -> str | None:
        if 0 in idle:
            return "Rank 0, which saves and prints, cannot be left idle"
        if search is None:
            return "Ranks can be left idle only with PlanConfig(layer_sums=True) and a loader of prepare_dataloader"
        return None

    def _any_plan(self, topology: Topology, all_devices: bool = True, stages: int | None = None) -> Plan:
        plan = self._run.plan
        # A replica that is left alone needs no ZeRO, and gets it again with the others.
        stages_of_zero = self._plugin.planning.zero_stages if self._shards else (0,)
        planning = replace(
            self._plugin.planning,
            micro_batch_sizes=(plan.micro_batch,),
            zero_stages=stages_of_zero,
            schedules=("1f1b",),
        )
        wishes = dict(tp_size=plan.tensor_parallel, pp_size=stages, unequal=stages is None, all_devices=all_devices)
        return best_plan(planning, topology, self._run.profile, **wishes)

    def _search(self) -> Search | None:
        """Finds plans in which ranks change places; None if the loader or the form of replicas does not allow it."""
        assert self._session is not None and self._session.objects is not None
        if self._run.unequal is None or not isinstance(self._session.objects.dataloader, HeteroDataLoader):
            return None
        held = layers_by_rank(self._run.plan)

        def search(topology: Topology, all_devices: bool = True) -> Plan:
            places = [held.get(rank) for rank in range(dist.get_world_size())]
            found = self._any_plan(topology, all_devices, self._arguments["pp_size"])  # which stays if it was given
            return seated(found, topology, self._run.profile, places)

        return search

    def _cost(self, proposal: Proposal, iteration: float) -> float:
        """Seconds of a move: an iteration is disturbed, the rest as in the last move, and state is sent."""
        plan, profile = proposal.plan, self._run.profile
        held, needed = layers_by_rank(self._run.plan), layers_by_rank(plan)
        device = plan.replicas[0].stages[0].device
        sizes = profile.costs(device, plan.tensor_parallel, plan.micro_batch).state_bytes * plan.tensor_parallel
        received = [missing_bytes(held.get(rank), needed[rank], sizes.tolist()) for rank in needed]
        return iteration + self._fixed_seconds + move_seconds(received, proposal.topology)

    def _may_move(self) -> bool:
        """False, with a warning, if a rank finds in its model what a move would not keep."""
        found = [each for each in of_every_rank(self._why_not()) if each is not None]
        if found and self._obstacle is None:
            self._obstacle = found[0]
            print_on_rank_0(
                f"a faster plan is known for the stages' present speeds, but layers stay where they are: {found[0]}"
            )
        return not found

    def _why_not(self) -> str | None:
        assert self._session is not None and self._session.objects is not None
        model, optimizer = self._session.objects.model, self._session.objects.optimizer
        added = [name for name, hook in _hooks_of(model) if (name, hook) not in self._hooks]
        if added:
            return (
                f"{added[0] or 'the model'} got a hook after booster.boost, which layers that move would lose; "
                "register hooks before booster.boost, or use PlanConfig(follow_speed=False)"
            )
        if _group_sizes(optimizer) != self._group_sizes:
            return (
                "the optimizer's parameter groups changed after booster.boost; make them before, or use "
                "PlanConfig(follow_speed=False)"
            )
        kept = [name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()]
        if kept:
            return (
                f"{kept[0]} has a gradient from before the last step; call optimizer.zero_grad() after each step, or "
                "use PlanConfig(follow_speed=False)"
            )
        return None

    # A move -------------------------------------------------------------------------------------------------------

    def _next_idle_clock(self, plan: Plan) -> IdleClock | None:
        rank, idle, known = dist.get_rank(), _idle_ranks(plan), self.idle_clock
        rates = of_every_rank(IdleClock.work_per_second() if rank in idle and known is None else None)
        if rank not in idle:
            return None
        if known is not None:
            return known.settled()
        stages = (stage.ranks for replica in self._run.plan.replicas for stage in replica.stages)
        own = next(ranks for ranks in stages if rank in ranks)
        # The speed that is known of all ranks of a stage is that of the slowest one.
        return IdleClock(min(rates[each] for each in own if rates[each] is not None))

    def _move(self, proposal: Proposal, is_back: bool = False) -> None:
        assert self._session is not None and self._session.objects is not None
        begin, before = time.monotonic(), self._plugin.plan
        training, loader = self._session.training(), self._session.objects.dataloader
        random = random_state_of(training.model)
        inner = training.model.unwrap()
        before_it = [*inner.named_parameters(), ("the model itself", inner)]
        known = [(name, weakref.ref(each)) for name, each in before_it]
        del inner, before_it
        if self._plugin._checkpoints is not None:
            self._plugin.wait_for_saves()
        held = release_state(training, in_step=False)
        self.idle_clock = self._next_idle_clock(proposal.plan)
        self._is_moving = True
        try:
            planning = replace(self._plugin.planning, cluster=proposal.topology, profile=self._run.profile)
            self._plugin.rebuild(**{**self._arguments, "plan": proposal.plan, "planning": planning})
            self._session.make_again(self._plugin, loader)
        finally:
            self._is_moving = False
        received, _ = restore(training, held, self._steps)
        restore_process(random)
        del held
        left = _first_in_use(known)
        if left is not None:
            gc.collect()
            left = _first_in_use(known)
        if left is not None:
            warnings.warn(
                f"layers have moved to other ranks, and the script still has a part of the model from before, "
                f"{left}, which is not trained any more; ask the model that booster.boost returned for its parts "
                "when you need them, or use PlanConfig(follow_speed=False)",
                stacklevel=5,
            )
        seconds = time.monotonic() - begin
        self._evidence.settle({})
        self._of_links.settle({})
        self._links.clear()
        self._caution.moved(layout_of(before), layout_of(self._run.plan), self._steps)
        self._fixed_seconds, self._seen, self._is_on_trial = seconds, None, not is_back
        self._ends.clear()
        change = PlanChange(
            self._steps,
            before,
            self._plugin.plan,
            proposal.present_seconds,
            seconds,
            max(of_every_rank(received)),
            is_back,
        )
        self.changes.append(change)
        print_on_rank_0(change.in_words())


def _idle_ranks(plan: Plan) -> tuple[int, ...]:
    return tuple(sorted({*range(dist.get_world_size())} - layers_by_rank(plan).keys()))


def _iteration_seconds(ends: Iterable[float]) -> float | None:
    """Median time from the end of a step to that of the next."""
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return median(seconds) if len(seconds) > 1 else None


def _first_in_use(parts: Sequence[tuple[str, weakref.ref[Any]]]) -> str | None:
    """The first of these parts of a model that Python's objects refer to. Graphs of passes that are kept somewhere do
    not count, so the referrers of tensors are looked for, of all at once, because that takes a while."""
    names = {id(part): name for name, each in parts if (part := each()) is not None}
    tensors = [part for _, each in parts if isinstance(part := each(), Tensor)]
    if len(names) > len(tensors):
        return next(name for name, each in parts if each() is not None and not isinstance(each(), Tensor))
    passing = FrameType, tuple  # pairs of names and parameters that an iterator over them has left
    referrers = [each for each in gc.get_referrers(*tensors) if not isinstance(each, passing)] if tensors else []
    in_use = {id(each) for found in referrers if found is not tensors for each in gc.get_referents(found)}
    return next((name for key, name in names.items() if key in in_use), None)


def _group_sizes(optimizer: Any) -> list[int]:
    return [len(group["params"]) for group in inner_optimizer(optimizer).param_groups]


def _hooks_of(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Hooks of modules and parameters, with names, except those of the libraries that divide and balance the model."""
    for name, module in model.named_modules():
        for kind in HOOKS:
            yield from ((name, hook) for hook in getattr(module, kind).values() if not is_from(hook, LIBRARIES))
    for name, parameter in model.named_parameters():
        for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
            yield from ((name, hook) for hook in (hooks or {}).values() if not is_from(hook, LIBRARIES))


def follows(planning: PlanConfig, arguments: Mapping[str, Any], is_elastic: bool) -> bool:
    """True if the run's plan follows the speeds of devices; ``ValueError`` if it should and cannot."""
    wanted = planning.follow_speed
    reason = _why_not_follow(planning, arguments, is_elastic)
    if wanted and reason is not None:
        raise ValueError(f"follow_speed=True is not possible: {reason}")
    return reason is None and (arguments["plan"] == "auto" if wanted is None else wanted)


def _why_not_follow(planning: PlanConfig, arguments: Mapping[str, Any], is_elastic: bool) -> str | None:
    if arguments["plan"] is None:
        return 'there is no plan; give the plugin plan="auto" or a plan'
    if planning.cluster is None or planning.profile is None or planning.global_batch_size is None:
        return "new plans are made from planning=PlanConfig(cluster=..., profile=..., global_batch_size=...); give all"
    if planning.drift_threshold == math.inf:
        return "with drift_threshold=inf stages are not timed; leave follow_speed or drift_threshold out"
    if is_elastic:
        return "elastic training plans again only when members come or go; leave follow_speed or elastic out"
    if arguments["batches"] is not None:
        return "batches=BatchConfig(...) divides batches by measured times itself; leave follow_speed or batches out"
    return None
