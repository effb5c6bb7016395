"""Training that goes on when members die or come: what the ranks do between two worlds.

[Note: between two worlds] An iteration ends with the commit of ``replica_gradients.py``, before which nothing has
changed a parameter. If a collective fails, all ranks leave the old world and form a new one; agree on the newest step,
which ranks that lack only this one make; make plan, plugin, model and optimizer again inside the script's objects; move
state to where the plan needs it; and repeat the passes since. A process that joins does the first in the plugin's
constructor and in ``booster.boost``, and the rest in ``plugin.resume``.

[Note: in a step] With ZeRO, parameters are gathered after masters are updated. If that fails, the step is made, and
parameters come from masters. But scripts have not yet called what comes after it, such as ``schedule.step()``. A
process that gets such a state begins with this iteration, and skips its passes and its ``optimizer.step``. If the
script of any member is past the step, a process that joins gets the state of that one.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from ...checkpoint.layer_checkpoint import Start
from ...checkpoint.run_states import Training
from ...common.methods import wrap_method
from ...common.ranks import is_lost_connection, of_every_rank, print_on_rank_0
from ...data_parallel.loader import HeteroDataLoader
from ...elastic.config import ElasticConfig
from ...elastic.held_layers import (
    CatchUp,
    Evaluations,
    Held,
    HeldLayers,
    Recovery,
    RecoveryDecision,
    Standing,
    agree,
    has_to_repeat,
    is_joined_inside,
)
from ...layers.dropout import SeededPasses
from ...planner.cost.runnable import NoPlanError
from ..replicas.replica_gradients import Commit, exchange
from ..training_objects import TrainingObjects
from .members import Members
from .planning import WaitForNodes
from .session import NOTHING, START_AGAIN, Session, StateLost, receive_state, release_state, restore

T = TypeVar("T")

log = logging.getLogger(__name__)


Build = Callable[[Sequence[str], Sequence[HeldLayers | None], int | None], tuple[HeldLayers, int]]
"""Makes the plugin again for these nodes; returns what this rank holds then, and the size of micro-batches."""

MAX_FAILURES = 3  # of a step with the same members; then training ends


class ElasticRun:
    """Lets a hybrid ``plugin``, and what it has boosted, go on in another world."""

    rejoins = True  # this process can join another world, if a member is lost while it joins one

    def __init__(self, plugin: Any, build: Build, members: Members, config: ElasticConfig) -> None:
        self._plugin, self._build, self._members, self._seed = plugin, build, members, config.seed
        self._waiting = WaitForNodes(members, config.join_seconds)
        self.version = 0  # optimizer steps that are done
        self.recoveries: list[Recovery] = []
        self._agreed: RecoveryDecision | None = None
        self._session: Session | None = None
        self._scheduler: Any = None
        self._loader: Any = None
        self._holds = self._complete = False
        self._layers: HeldLayers | None = None
        self._micro_batch: int | None = None
        self._commit: Commit | None = None
        self._held: Held | None = None
        self._calls: list[Callable[[], Any]] = []
        self._inner_step: Callable[..., Any] | None = None
        self._random: SeededPasses | None = None
        self._loader_is_old = self._repeats_evaluation = False
        self._stepping: int | None = None  # steps that were done when the script's running ``optimizer.step`` began
        self._skips = False  # the script's first iteration; see [Note: in a step]
        self.evaluations = Evaluations()
        self._steps_in_world = 0

    def start(self) -> None:
        """Form the first world of this process, however often it takes."""
        while True:
            try:
                return self.form()
            except RuntimeError as error:
                if not self.rejoins:
                    raise
                reason = _lost(error)
            self._members.fail(reason)
            self._members.leave()

    def form(self) -> None:
        """Form a world with enough devices, agree on the newest step, and make the plugin. Called by all members."""
        while True:
            nodes, held, micro_batch = self._form_world()
            try:
                self._new_layers, self._micro_batch = self._build(nodes, held, micro_batch)
            except NoPlanError as error:
                problem = str(error)
            else:
                self._waiting.end()
                return
            self._waiting.wait(problem)
            self._hand_over(saves=False)
            with suppress(RuntimeError):
                self._members.leave()

    def _form_world(self) -> tuple[Sequence[str], list[HeldLayers | None], int | None]:
        """Form a world, agree on the newest step; returns nodes, held layers, and the size of micro-batches so far."""
        nodes = self._members.form_world()
        self._steps_in_world = 0
        done, has_results = self.evaluations.done, self.evaluations.has_results
        standing = Standing(self.version if self._holds else None, self._complete, self._commit, done, has_results)
        draws = self._holds and self._random is not None and self._random.draws
        micro_batch = self._micro_batch if draws else None
        everyone = of_every_rank((standing, self._layers if self._holds else None, micro_batch))
        standings = [each for each, _, _ in everyone]
        stayed = [each for each in standings if each.version is not None]
        if is_joined_inside(standings):
            raise StateLost(f"a process has joined while the others recover in an evaluation; {START_AGAIN}")
        self._repeats_evaluation = standing.version is not None and has_to_repeat(standing, stayed)
        if standing.version is None:
            self.evaluations.done = max((each.evaluations for each in stayed), default=0)
        self._agreed = agree(standings)
        if self._agreed is not None:
            catch_up = self._agreed.catch_ups[dist.get_rank()]
            if self._holds and catch_up is CatchUp.FORGET:
                raise self._left_behind(self._agreed.version)
            if catch_up is CatchUp.STEP:
                assert self._inner_step is not None
                commit, optimizer = self._agreed.commit, self._objects.optimizer
                optimizer.gradients.exchange, optimizer.is_alone = lambda *_: commit, True
                self._inner_step()
                self._stepped(commit)
        if self._holds and self._held is None:
            self._held = self._let_go()
        micro_batch = next((size for _, _, size in everyone if size is not None), None)
        return nodes, [layers for _, layers, _ in everyone], micro_batch

    def _left_behind(self, step: int) -> SystemExit:
        return SystemExit(
            f"this process was taken for dead at step {self.version}, and the others are at step {step}; start it "
            "again to join them"
        )

    def _let_go(self) -> Held:
        """Take what this rank holds out of the old model and optimizer, and the groups of the old world from them."""
        self._inner_step = None
        return release_state(self._training(self._scheduler, self._loader), self._is_in_step)

    @property
    def _is_in_step(self) -> bool:
        """True if a step is made, but the script has not done yet what it does after it."""
        return self._skips or (self._stepping is not None and self.version > self._stepping)

    def note(self, objects: TrainingObjects) -> None:
        if self._session is None and objects.optimizer is not None:
            self._session = Session(objects)

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        assert self._session is not None
        if self._session.objects is None:
            self._session.objects = objects
        optimizer = objects.optimizer
        self._inner_step = optimizer.step
        optimizer.gradients.exchange = self._exchange
        wrap_method(optimizer, "step", self._step)
        model = objects.model.unwrap()
        row = self._session.row
        blocks = {} if row is None else dict(model.get_submodule(row).named_children())
        self._random = SeededPasses(model, blocks, dist.get_rank(plugin.tp_group))
        self._members.seal()

    def configure(
        self, configure: Callable[[TrainingObjects], TrainingObjects], objects: TrainingObjects
    ) -> TrainingObjects:
        """Configure what the script boosts; in another world if a member is lost meanwhile and this process joins."""
        if self._session is not None or objects.optimizer is None:
            return configure(objects)

        def again(reason: str) -> TrainingObjects:
            assert self._session is not None
            self._loader_is_old, self._session.objects = True, None
            self._form_again(reason)
            return configure(self._session.without_state(objects))

        return self._joining(partial(configure, objects), again)

    def _joining(self, first: Callable[[], T], again: Callable[[str], T]) -> T:
        """What ``first`` returns; if a member is lost in it, what ``again`` does in another world, for this reason."""
        try:
            return first()
        except RuntimeError as error:
            if self._agreed is None or self._session is None or not self.rejoins:
                raise  # without others, only the script has the model's first weights
            reason = _lost(error)
        while True:
            try:
                return again(reason)
            except RuntimeError as error:
                reason = _lost(error)

    def resume(
        self, lr_scheduler: Any, loader: Any, load: Callable[[], Start], saved_step: Callable[[], int | None]
    ) -> Start:
        """Begin to train: with the state that the others hold, or with what ``load`` finds. Every rank calls it."""
        if not isinstance(loader, HeteroDataLoader):
            raise TypeError(
                f"plugin.resume got the loader {loader!r}; elastic training draws batches again after a member was "
                "lost, so it needs the loader that plugin.prepare_dataloader(dataset) makes without a batch_size"
            )
        self._scheduler, self._loader = lr_scheduler, loader
        if self._agreed is None:
            start = load()
            self.version = start.step
            if dist.get_rank() == 0 and self._members.board is not None:
                # The board outlives workers that start again, and may know a later step.
                self._members.board.publish("steps", str(self.version))
        else:
            if self._loader_is_old:
                self._plugin.adopt(self._objects.model, loader)
            received = self._joining(
                partial(self._restore, lr_scheduler, loader),
                lambda reason: self._go_on(reason, lr_scheduler, loader),
            )
            self.version = self._agreed.version
            step = self.version - self._skips
            start = Start(step, int(loader.state_dict()["epoch"]), received_bytes=received)
        self._holds, self._layers = True, self._new_layers
        return start

    def _training(self, lr_scheduler: Any, loader: Any) -> Training:
        assert self._session is not None
        return self._session.training(lr_scheduler, loader)

    @property
    def _objects(self) -> TrainingObjects:
        assert self._session is not None and self._session.objects is not None
        return self._session.objects

    def _restore(self, lr_scheduler: Any, loader: Any) -> int:
        assert self._agreed is not None
        received, in_step = restore(self._training(lr_scheduler, loader), self._held, self._agreed.version)
        if not self._holds:
            self._skips = in_step
        return received

    def _before_call(self) -> None:
        """Called when the script calls :meth:`run`, :meth:`evaluate` or :meth:`guarded`."""

    def run(self, passes: Callable[[], dict]) -> dict:
        """Run forward and backward passes, in another world if this one breaks."""
        self._before_call()
        if self._skips:
            return {"loss": None, "outputs": None}
        if not self._calls and self._commit is not None and any(self._commit.words):
            self._change("a member joins or leaves", failed=False)
        seeded = partial(self._seeded, passes, len(self._calls))
        self._calls.append(seeded)
        try:
            return seeded()
        except RuntimeError as error:
            reason = _lost(error)
        self._change(reason)
        return self._repeat()

    def _seeded(self, passes: Callable[[], dict], call: int) -> dict:
        """Run ``passes``, the ``call``-th since the last step, with random numbers that do not depend on the plan."""

        def seed_of(micro_batch: int) -> int:
            # Python's hash of integers is the same in all processes.
            return hash((self._seed, self.version, call, *self._plugin.micro_batch_place(micro_batch)))

        assert self._random is not None
        with self._random.run(seed_of):
            return passes()

    def is_broken(self) -> bool:
        return self._members.is_broken()

    def evaluate(self, model: Any, batches: Iterator[Any], evaluate: Callable[[Iterator[Any]], dict]) -> dict:
        self._before_call()
        if not self._holds or self._calls:  # not in training yet, or gradients would be lost
            return evaluate(batches)

        def change(error: RuntimeError) -> bool:
            is_training = model.training
            self._change(_lost(error))
            model.train(is_training)
            return self._repeats_evaluation

        return self.evaluations.run(evaluate, batches, change)

    def guarded(self, action: Callable[[], T], otherwise: T) -> T:
        """Do an action of all ranks together; returns ``otherwise`` if a member is lost meanwhile."""
        self._before_call()
        try:
            return action()
        except RuntimeError as error:
            reason = _lost(error)
        self._change(reason)
        return otherwise

    def finish(self) -> None:
        with suppress(RuntimeError):  # a member that is lost now has nothing that the others lack
            dist.barrier()
        self._members.end_job()
        self._members.depart()

    def _repeat(self) -> dict:
        result: dict = {}
        while True:
            try:
                for passes in self._calls:
                    result = passes()
                return result
            except RuntimeError as error:
                reason = _lost(error)
            self._change(reason)

    def _step(self, _: Any, *args: Any, **kwargs: Any) -> Any:
        assert self._inner_step is not None
        if self._skips:
            self._skips = False
            return None
        self._stepping = version = self.version
        try:
            try:
                result = self._inner_step(*args, **kwargs)
                assert self._commit is not None
                self._stepped(self._commit)
                lost = self._objects.optimizer.lost
                if lost is not None:
                    raise lost
                return result
            except RuntimeError as error:
                reason = _lost(error)
            self._change(reason)
        finally:
            self._stepping = None
        if self.version > version:  # made, here or with what the others agreed on
            return None
        self._repeat()
        return self._objects.optimizer.step(*args, **kwargs)

    def _stepped(self, commit: Commit) -> None:
        self.version += 1
        self._commit, self._complete = commit, False
        self._calls = []
        self._steps_in_world += 1
        # A member of this world is at most one step behind, so that one that is not knows it before it joins again.
        if self._steps_in_world == 2 and dist.get_rank() == 0 and self._members.board is not None:
            self._members.board.publish("steps", str(self.version))

    def _exchange(self, squared_norm: Tensor, has_gradient: Sequence[bool], is_read: bool) -> Commit:
        self._complete = True
        waiting = dist.get_rank() == 0 and self._members.is_somebody_waiting()
        words = [float(self._members.is_leaving()), float(waiting)]
        commit = exchange(squared_norm, has_gradient, words=words)
        self._commit = commit
        return commit

    def _change(self, reason: str, failed: bool = True) -> None:
        """Go on in another world, because this one has ``failed``, or because of a member that joins or leaves."""
        begin, members = time.monotonic(), dist.get_world_size()
        self._check_progress(reason)
        received = 0
        while True:
            try:
                if not failed:
                    received += self._hand_over()
                received += self._go_on(reason if failed else None)
                break
            except RuntimeError as error:
                reason, failed = _lost(error), True
        seconds, repeated = time.monotonic() - begin, int(bool(self._calls))
        self.recoveries.append(
            Recovery(self.version, members, dist.get_world_size(), seconds, received, repeated, reason)
        )
        words = self.recoveries[-1].in_words()
        log.debug("rank %d: %s", dist.get_rank(), words)
        print_on_rank_0(words)

    def _check_progress(self, reason: str) -> None:
        same = [each.version == self.version and each.before == each.after for each in self.recoveries[-MAX_FAILURES:]]
        if len(same) == MAX_FAILURES and all(same):
            raise RuntimeError(
                f"step {self.version + 1} has failed {MAX_FAILURES} times, although all members were there; the latest "
                f"reason: {reason}"
            )

    def _hand_over(self, saves: bool = True) -> int:
        """Take what only members hold that leave, while they are there; returns the bytes received. Those that leave
        end here. If all leave and the plugin ``saves``, the last state is saved before."""
        leaving = of_every_rank(self._members.is_leaving())
        if not any(leaving):
            return 0
        received = 0
        if not all(leaving):
            held = self._held or (self._let_go() if self._holds else NOTHING)
            self._held, received = receive_state(held, leaving)
            dist.barrier()
        elif saves:
            is_saved = self._plugin.save_last(self._training(self._scheduler, self._loader), self.version)
            what = "is saved" if is_saved else "is not saved: the plugin has no checkpoints=CheckpointConfig(...)"
            print_on_rank_0(f"all members leave; the state after step {self.version} {what}")
        if leaving[dist.get_rank()]:
            self._members.depart()
            raise SystemExit(0)
        return received

    def _form_again(self, reason: str | None) -> None:
        if reason is not None:
            self._members.fail(reason)
        with suppress(RuntimeError):
            self._members.leave()
        assert self._members.board is not None
        steps = int(self._members.board.published("steps") or 0)
        if self._holds and steps > self.version + 1:
            raise self._left_behind(steps)
        gc.collect()
        self.form()
        if self._agreed is None:
            raise StateLost(f"all members with a state of training were lost; {START_AGAIN}")

    def _go_on(self, reason: str | None, lr_scheduler: Any = None, loader: Any = None) -> int:
        self._form_again(reason)
        assert self._session is not None and self._agreed is not None
        self._session.make_again(self._plugin, self._loader)
        received = self._restore(lr_scheduler, loader)
        self.version, self._held, self._layers = self._agreed.version, None, self._new_layers
        if self._commit is not None:  # what a member of the old world has said there
            self._commit = replace(self._commit, words=())
        return received


def _lost(error: RuntimeError) -> str:
    words = str(error)
    if not (isinstance(error, dist.DistError) or is_lost_connection(words)):
        raise error
    ended, _, _ = words.partition(", and the other ranks")
    return ended if "ended" in ended else "a connection was lost"
