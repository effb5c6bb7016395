"""Training whose processes end when a member is lost or comes, and continue when they are started again.

[Note: recovery by restart] torchrun starts the processes again, in a world that may be another one. They do what a
process does that joins ([Note: between two worlds] in ``elastic_run.py``), but what each rank holds comes out of the
memory files of its node's former processes. A step that only some ranks have made counts if they have all its state.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from ...checkpoint.held_pieces import pieces_of
from ...checkpoint.layer_checkpoint import Start
from ...checkpoint.optimizer_memory import state_entries
from ...common.ranks import of_every_rank
from ...common.text import say
from ...elastic.config import ElasticConfig
from ...elastic.environment import STORE
from ...elastic.held_layers import CatchUp, Held, HeldLayers, RecoveryDecision, layers_by_rank
from ...elastic.memory_file import (
    KeptState,
    MemoryFile,
    MemoryFolder,
    StateName,
    default_memory,
    newest_whole_state,
    read_memory_file,
)
from ...elastic.signals import AbortWatch, TerminationWatch
from ...elastic.state_keeper import StateKeeper
from ..replicas.replica_gradients import Commit
from .elastic_run import Build, ElasticRun
from .members import JobMember, Members, RestartedMember
from .planning import cluster_of, elastic_planning, profile_of
from .session import state_now

START_AGAIN_CODE = 1  # of a process that is to be started again
SIGTERM_SECONDS = 20.0
"""After SIGTERM or ``abort``, so long a process may take to finish a step before its state is written. torchrun kills
30 s after SIGTERM."""


class RestartRun(ElasticRun):
    """Lets a hybrid plugin go on in other processes; see [Note: recovery by restart]."""

    rejoins = False

    def __init__(self, plugin: Any, build: Build, members: Members, config: ElasticConfig) -> None:
        super().__init__(plugin, build, members, config)
        self._config = config
        self._keeper: StateKeeper | None = None
        self._end_watches: list[AbortWatch | TerminationWatch] = []

    def form(self) -> None:
        """Form the world, find the newest whole state in memory files, and make the plugin."""
        nodes = self._members.form_world()
        self._folder = MemoryFolder(self._config.memory or default_memory(), self._members.job, self._members.node)
        self._folder.prepare()
        node = self._members.node
        self._slot = nodes[: dist.get_rank()].count(node)
        read = (
            read_memory_file(self._folder.file(name)) for name in self._folder.files()[self._slot :: nodes.count(node)]
        )
        files = [file for file in read if file is not None]
        token = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        everyone = of_every_rank((token, [file.found for file in files]))
        self._world = everyone[0][0]
        newest = newest_whole_state(found for _, of_rank in everyone for found in of_rank)
        chosen = [file for file in files if file.found.name == newest]
        layers = of_every_rank(chosen[0].layers if chosen else None)
        if newest is not None:
            self._held = _held(chosen)
            catch_ups = tuple(CatchUp.FORGET if each is None else CatchUp.KEEP for each in layers)
            self._agreed = RecoveryDecision(newest.version, None, catch_ups)
        self._keeper = StateKeeper(self._folder, self._slot, self._config.memory_every, tidies=self._slot == 0)
        self._new_layers, _ = self._build(nodes, layers, None)

    def resume(
        self, lr_scheduler: Any, loader: Any, load: Callable[[], Start], saved_step: Callable[[], int | None]
    ) -> Start:
        """Begin to train: with the state in memory files, or, if that on disks is newer, with what ``load`` finds."""
        if self._agreed is not None and (saved_step() or 0) > self._agreed.version:
            self._agreed, self._held = None, None
        is_kept = self._agreed is not None
        start = super().resume(lr_scheduler, loader, load, saved_step)
        self._held = None
        if is_kept and dist.get_rank() == 0:
            members = dist.get_world_size()
            say(f"training continues after step {start.step}, whose state was in memory; members: {members}")
        kinds = (AbortWatch, TerminationWatch) if isinstance(self._members, RestartedMember) else (AbortWatch,)
        self._end_watches = [kind(partial(self._write_within, SIGTERM_SECONDS)) for kind in kinds]
        atexit.register(self._write_within, 0.0)
        return start

    def finish(self) -> None:
        """End training: the memory files are not needed any more. Every rank calls it."""
        assert self._keeper is not None
        try:
            self._keeper.settle()
            dist.barrier()
        except RuntimeError as error:
            self._end(str(error))
        self._keeper.close()
        atexit.unregister(self._write_within)
        for watch in self._end_watches:
            watch.close()
        if self._slot == 0:
            self._folder.remove_all()
        self._members.end_job()
        self._members.depart()

    def _before_call(self) -> None:
        """Note that the last step is done, and so what the script does after it: from now on its state can be kept."""
        if self._calls or not self._holds:
            return
        assert self._keeper is not None and self._layers is not None
        if self._keeper.version == self.version:
            return
        training = self._training(self._scheduler, self._loader)
        pieces = pieces_of(training.model, training.optimizer, training.outline)
        state = state_now(training, pieces, self._is_in_step)
        name, kinds = StateName(self.version, self._world), state_entries(training.optimizer)
        # Passes change buffers.
        kept = [replace(each, data=each.data.clone()) if each.key.startswith("buffer.") else each for each in pieces]
        self._keeper.note(KeptState(name, training.outline.stored, self._layers, kept, kinds, state))

    def _exchange(self, squared_norm: Tensor, has_gradient: Sequence[bool], is_read: bool) -> Commit:
        assert self._keeper is not None
        self._keeper.settle()
        with self._keeper.commit():
            return super()._exchange(squared_norm, has_gradient, is_read)

    def _change(self, reason: str, failed: bool = True) -> None:
        """End all processes: a member is lost, leaves or joins. First take what only leaving ones hold."""
        assert self._keeper is not None
        self._before_call()  # if the step was made
        if not failed:
            try:
                self._hand_over()
            except RuntimeError as error:
                reason = f"{reason}; {error}"
            if self._held is not None:
                self._keeper.note_again(self._held.pieces)
        self._end(reason)

    def _end(self, reason: str) -> NoReturn:
        assert self._keeper is not None
        version = self._keeper.version
        is_written = self._write_within(0.0)
        self._plugin.give_up_saves()
        if os.environ.get("LOCAL_RANK") == "0":
            kept = f"; the state after step {version} is in {self._folder.path}" if is_written else ""
            say(f"the processes of node {self._members.node} end, to be started again: {reason}{kept}")
        with suppress(RuntimeError):
            self._members.fail(reason)
            self._members.depart()
        raise SystemExit(START_AGAIN_CODE)

    def _write_within(self, seconds: float) -> bool:
        assert self._keeper is not None
        return self._keeper.write_within(seconds)


def _held(files: Sequence[MemoryFile]) -> Held | None:
    if not files:
        return None
    pieces = {(piece.key, piece.box): piece for file in files for piece in file.pieces()}
    kinds = {entry: kind for file in files for entry, kind in file.kinds.items()}
    return Held(list(pieces.values()), kinds, files[0].state)


def elastic_run_of(plugin: Any, arguments: Mapping[str, Any], config: ElasticConfig) -> ElasticRun:
    """Make this process a member of its job, as its options and whoever has started it say."""
    is_in_place = config.recovery == "in-process"
    kind: type[JobMember] | type[RestartedMember] = JobMember if is_in_place or STORE in os.environ else RestartedMember
    cluster = cluster_of(arguments)
    members = kind(config, cluster)
    profile = profile_of(arguments, members.kind)

    def build(
        nodes: Sequence[str], held: Sequence[HeldLayers | None], micro_batch: int | None
    ) -> tuple[HeldLayers, int]:
        planning = elastic_planning(arguments, cluster, profile, nodes)
        plan = plugin.build_again(arguments, planning, held, micro_batch)
        return layers_by_rank(plan)[dist.get_rank()], plan.micro_batch

    return (ElasticRun if is_in_place else RestartRun)(plugin, build, members, config)
