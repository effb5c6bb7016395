"""A job of several member processes that train a small language model, of which a test kills some and starts others."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.zero.low_level.bookkeeping import TensorBucket
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from colossal_hetero import CheckpointConfig, ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.checkpoint.storage import FileOperations
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.plugin.elastic import session
from colossal_hetero.plugin.elastic.members import JobMember
from colossal_hetero.plugin.replicas.replica_gradients import ReplicaGradients
from colossal_hetero.plugin.zero.gradient_sums import GradientSums
from tests.parallel.plugin.unequal.test_unequal_replicas import VOCABULARY, gpt2, loss_of
from tests.support.harness import check_preloaded, forked_context
from tests.support.layer_profiles import layer_times
from tests.support.training import train_alone

BLOCKS, MICRO_BATCH, GLOBAL_BATCH, BATCHES = 4, 2, 12, 8
LIMIT_SECONDS = 240
NODES = ("big-0", "small-0", "small-1", "small-2", "big-1")
BIG_NODES = ("big-0", "big-1", "big-2", "big-3", "big-4")
"""Nodes that can all hold the model, so that each has a replica."""


def cluster(names: Sequence[str] = NODES, devices_per_node: Sequence[int] = (1, 1, 1, 1, 1)) -> Topology:
    """Nodes, by default of a device each; the small ones cannot hold the model alone."""
    memory, network = Channel("shared memory", 1e10, 1e-6), Channel("Ethernet", 1e10, 1e-6)
    kinds = dict(big=DeviceKind("big", 10**9, 1e9), small=DeviceKind("small", 17 * 10**7, 1e9))
    devices: list[Device] = []
    nodes: list[Node] = []
    for number, (name, count) in enumerate(zip(names, devices_per_node, strict=True)):
        own = tuple(range(len(devices), len(devices) + count))
        devices += [Device(kinds[name.split("-")[0]], node=number, cluster=0)] * count
        nodes.append(Node(name, 0, own, memory, (network,)))
    return Topology(tuple(devices), tuple(nodes), ("here",))


def profile() -> ModelProfile:
    """Equal blocks of 10 MB, which take a millisecond per sample."""
    layers = BLOCKS + 2
    sizes = LayerSizes(
        parameter_bytes=(0, *(10**7,) * BLOCKS, 0),
        activation_bytes=(1000,) * layers,
        output_bytes=(1000,) * (layers - 1) + (0,),
    )
    seconds = (0.0, *(1e-3 * MICRO_BATCH,) * BLOCKS, 0.0)
    times = tuple(layer_times(kind, seconds, micro_batch=MICRO_BATCH) for kind in ("big", "small"))
    return ModelProfile(name="gpt2", times=times, sizes=(sizes,))


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens; the same in every process."""

    def __len__(self) -> int:
        return BATCHES * GLOBAL_BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
        return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


@functools.cache
def undisturbed(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model = gpt2().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    data, firsts = Texts(), (step % BATCHES * GLOBAL_BATCH for step in range(steps))
    batches = (default_collate([data[first + number] for number in range(GLOBAL_BATCH)]) for first in firsts)
    losses = train_alone(model, optimizer, batches, lambda model, batch: loss_of(model(**batch), batch), 1.0, schedule)
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def check_parameters(everyone: Iterable[Mapping[str, Any]], steps: int, tolerance: float = 1e-9) -> None:
    """The parameters of members, in NumPy, are those of :func:`undisturbed`."""
    _, expected = undisturbed(steps)
    everyone = list(everyone)
    assert everyone
    for parameters in everyone:
        for name, found in parameters.items():
            reference = expected.get(name, expected["transformer.wte.weight"])
            torch.testing.assert_close(
                torch.from_numpy(found)[: len(reference)], reference, rtol=tolerance, atol=tolerance
            )


QUICK = dict(dead_seconds=1.0, last_call_seconds=0.5)
"""Options of an ``ElasticConfig`` whose members notice soon who is gone, and do not wait for long."""


# Processes that end themselves with SIGKILL -------------------------------------------------------------------------


DOOM = "COLOSSAL_TEST_DOOM"
"""The environment variable with the path of a file: when it is there, the process ends in the phase that it names."""

PHASES: dict[str, tuple[Any, str, bool]] = {
    "forward": (GPT2Block, "forward", False),
    "evaluation": (GPT2Block, "forward", False),
    "backward": (torch.autograd, "backward", False),
    "sums": (GradientSums, "finish", False),
    "before commit": (ReplicaGradients, "commit", False),
    "after commit": (ReplicaGradients, "commit", True),
    "saving": (FileOperations, "write", True),
    "re-forming": (JobMember, "form_world", False),
    "formed": (JobMember, "form_world", True),
    "moving": (session, "move_pieces", False),
    "moved": (session, "move_pieces", True),
    "gathering": (TensorBucket, "all_gather", False),  # parameters, after ZeRO's step
    "gathered": (TensorBucket, "all_gather", True),
}
"""What is called in each phase: owner, name, and whether the process ends after it instead of before."""


@dataclass(frozen=True)
class Kill:
    """Where a member ends itself."""

    version: int  # optimizer steps that are done
    phase: str  # one of :data:`PHASES`
    recoveries: int = 0  # that it has gone through, at least


@contextmanager
def phases(kill: Kill | None, progress: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """In the block, the process ends itself where ``kill`` says, or when the file of :data:`DOOM` is there.
    ``progress`` tells how many optimizer steps are done, and recoveries."""
    doom = os.environ.get(DOOM)
    if kill is None and doom is None:
        yield
        return

    def check(phase: str) -> None:
        if phase in ("forward", "evaluation") and (phase == "forward") != torch.is_grad_enabled():
            return
        if kill is not None and kill.phase == phase:
            version, recoveries = progress()
            if version == kill.version and recoveries >= kill.recoveries:
                os.kill(os.getpid(), signal.SIGKILL)
        if doom is not None and os.path.exists(doom) and Path(doom).read_text() == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(function: Callable[..., Any], phase: str, after: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            check("" if after else phase)
            result = function(*args, **kwargs)
            check(phase if after else "")
            return result

        return run

    # Functions that two phases watch are wrapped twice.
    with ExitStack() as stack:
        for phase, (owner, name, after) in PHASES.items():
            stack.enter_context(patch.object(owner, name, watched(getattr(owner, name), phase, after)))
        yield


class DoubleZeroPlugin(HeteroHybridParallelPlugin):
    """A plugin whose ZeRO is in fp64, with masters too. Colossal-AI's masters are fp32."""

    def _build(self, **arguments: Any) -> None:
        super()._build(**arguments)
        self.zero_config["forced_dtype"] = None

    def _configure(self, objects: Any) -> Any:
        with patch.object(Tensor, "float", lambda tensor: tensor):
            return super()._configure(objects)


# Members --------------------------------------------------------------------------------------------------------------


def train(
    steps: int,
    kill: Kill | None,
    folder: Path | None,
    joins: Sequence[int],
    told: Any,
    elastic: ElasticConfig | None = None,
    topology: Topology | None = None,
    at_end: Callable[[Booster, Any, Any], None] = lambda *_: None,
    after_step: Callable[[Booster, Any], None] = lambda *_: None,
    zero_stage: int = 0,
    min_replicas: int = 2,
) -> None:
    """What every member does: the script of a user. It waits at the steps in ``joins`` until a member has started."""
    checkpoints = None if folder is None else CheckpointConfig(shared=folder, save_every=3)
    planning = PlanConfig(
        cluster=topology or cluster(), profile=profile(), global_batch_size=GLOBAL_BATCH, min_replicas=min_replicas
    )
    parts = dict(planning=planning, elastic=elastic or ElasticConfig(**QUICK), checkpoints=checkpoints)
    kind = DoubleZeroPlugin if zero_stage else HeteroHybridParallelPlugin
    plugin = kind(plan="auto", **parts, precision="fp32", max_norm=1.0, zero_stage=zero_stage)
    with phases(kill, lambda: (plugin.version, len(plugin.recoveries))):
        model = gpt2().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        loader = plugin.prepare_dataloader(Texts())
        booster = Booster(plugin=plugin)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
        start = plugin.resume(model, optimizer, schedule, loader)
        step = start.step
        told.put(("started", start))
        for epoch in range(start.epoch, -(-steps // BATCHES)):
            loader.set_epoch(epoch)
            for batches in loader.rest_of_epoch():
                result = booster.execute_pipeline(batches, model, loss_of, optimizer, return_loss=True)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                if checkpoints is not None and plugin.save(model, optimizer, schedule, loader, step=step, epoch=epoch):
                    plugin.wait_for_saves()
                loss = None if result["loss"] is None else float(result["loss"])
                told.put(("step", step, dist.get_world_size(), plugin.replica()[0], loss))
                after_step(booster, model)
                if step in joins and dist.get_rank() == 0:
                    while not plugin._elastic._members.is_somebody_waiting():
                        time.sleep(0.05)
                if step == steps:
                    break
    at_end(booster, model, optimizer)
    named = model.unwrap().named_parameters()
    told.put(("done", {name: each.detach().clone().numpy() for name, each in named}, plugin.recoveries))
    plugin.finish()


class Told:
    """What a member says to the job that has started it, from any thread."""

    def __init__(self, results: Connection) -> None:
        self._results, self._lock = results, threading.Lock()

    def put(self, message: Any) -> None:
        with self._lock:
            self._results.send(message)


def _run_told(sender: Connection, target: Callable[..., None], *arguments: Any) -> None:
    target(Told(sender), *arguments)


def _member(told: Told, port: int, node: str, script: tuple[Any, ...], doom: Path | None) -> None:
    check_preloaded()
    if doom is not None:
        os.environ[DOOM] = str(doom)
    store = dict(COLOSSAL_HETERO_STORE=f"127.0.0.1:{port}", COLOSSAL_HETERO_JOB="test", COLOSSAL_HETERO_NODE=node)
    os.environ |= store | dict(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    torch.set_num_threads(1)
    try:
        script[0](*script[1:], told)
    except SystemExit as end:
        if end.code:
            told.put(("error", str(end.code)))
        raise
    except BaseException:
        told.put(("error", traceback.format_exc()))
        raise


@dataclass
class Outcome:
    """What the members of a job have told."""

    losses: dict[int, dict[int, float]] = field(default_factory=dict)
    """By step: of each replica, as it was when the step was made."""
    parameters: list[Mapping[str, Any]] = field(default_factory=list)  # of the members that have finished
    recoveries: list[Any] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)  # where each member has begun
    ended: dict[int, int] = field(default_factory=dict)  # exit code of each member

    def check(self, steps: int, first: int = 1) -> None:
        """The steps from ``first`` on were made without an error, and the parameters are those of one process."""
        assert self.errors == [] and sorted(self.losses) == list(range(first, steps + 1)), self.errors
        check_parameters(self.parameters, steps)

    @property
    def changes(self) -> list[Any]:
        """The recoveries of all members that have finished."""
        return [change for of_member in self.recoveries for change in of_member]


class Job:
    """A store and members, which are killed at the end of the ``with`` block. Members call ``script``, a function and
    its first arguments, or :func:`train`: so many ``steps``, with layer checkpoints of every third step in ``folder``;
    at the steps ``joins`` they wait until another one has started. ``dooms`` is a folder for :meth:`doom`; ``options``
    are further ones of :func:`train`."""

    def __init__(
        self,
        steps: int,
        script: tuple[Any, ...] | None = None,
        folder: Path | None = None,
        joins: Sequence[int] = (),
        dooms: Path | None = None,
        **options: Any,
    ) -> None:
        self._dooms, self._train = dooms, partial(train, **options)
        self._context = forked_context()
        # Not one queue: a member that is killed or frozen may hold the lock of a queue, which all others then wait for.
        self._results: dict[Connection, int] = {}
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._steps, self._script, self._folder, self._joins = steps, script, folder, tuple(joins)
        self.members: list[Any] = []  # processes
        self.nodes: list[str] = []  # of each member
        self.outcome = Outcome()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
            member.join()

    def start(self, node: str, kill: Kill | None = None, script: tuple[Any, ...] | None = None) -> int:
        """Start a member, with a script of its own if one is given; returns its number."""
        number = len(self.members)
        script = script or self._script or (self._train, self._steps, kill, self._folder, self._joins)
        doom = None if self._dooms is None else self._dooms / str(number)
        self._launch(_member, self._server.port, node, script, doom)
        self.nodes.append(node)
        return number

    def _launch(self, target: Callable[..., None], *arguments: Any) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        self._results[receiver] = len(self.members)
        arguments = (sender, target, *arguments)
        self.members.append(self._context.Process(target=_run_told, args=arguments, daemon=True))
        self.members[-1].start()
        sender.close()

    def doom(self, number: int, phase: str) -> None:
        """Let a member end itself with SIGKILL when it is in a phase of :data:`PHASES` next."""
        assert self._dooms is not None
        path = self._dooms / str(number)
        path.with_suffix(".new").write_text(phase)
        path.with_suffix(".new").rename(path)

    def alive(self) -> list[int]:
        return [number for number, member in enumerate(self.members) if member.is_alive()]

    def message(self, seconds: float = 0.2) -> tuple[int, str, list[Any]] | None:
        """The next message of a member: its number, what it is, and more; None if none comes soon."""
        arrived = wait(list(self._results), timeout=seconds)
        if not arrived:
            return None
        results = random.choice(arrived)  # else one that sends often keeps all others waiting
        number = self._results[results]
        try:
            kind, *content = results.recv()
        except (EOFError, OSError):  # it has ended, maybe within a message
            del self._results[results]
            return self.message(seconds) if self._results else None
        if kind == "step" and content[3] is not None:
            version, _, replica, loss = content
            self.outcome.losses.setdefault(version, {})[replica] = loss
        elif kind == "done":
            self.outcome.parameters.append(content[0])
            self.outcome.recoveries.append(content[1])
        elif kind == "started":
            self.outcome.starts.append(content[0])
        elif kind == "error":
            self.outcome.errors.append(content[0])
        return number, kind, content

    def run(self, at_message: Callable[[int, str, list[Any]], None] = lambda *_: None) -> Outcome:
        """Wait until all members have ended, and give ``at_message`` what they say."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.alive():
            assert time.monotonic() < deadline, self.outcome
            if (message := self.message()) is not None:
                at_message(*message)
        return self.finish()

    def finish(self) -> Outcome:
        """What all members have told, after they have ended."""
        while self.message() is not None:
            pass
        self.outcome.ended = {number: member.exitcode or 0 for number, member in enumerate(self.members)}
        return self.outcome


def run_job(
    nodes: Sequence[str],
    steps: int,
    kills: Mapping[int, Kill] | None = None,
    joins: Mapping[str, int] | None = None,
    warnings: Mapping[int, int] | None = None,
    folder: Path | None = None,
    script_of: Callable[[int], tuple[Any, ...] | None] = lambda number: None,
    **options: Any,
) -> Outcome:
    """Run a job until all its members have ended. ``kills``: by number of the member; ``joins``, by node, and
    ``warnings`` (SIGTERM), by number: the step after which. ``script_of``: the script of a member, by number; default
    :func:`train` with ``options``."""
    kills, joins, warned = kills or {}, dict(joins or {}), dict(warnings or {})

    def start(node: str) -> None:
        number = len(job.members)
        job.start(node, kills.get(number), script_of(number))

    def at_message(_: int, kind: str, content: list[Any]) -> None:
        if kind != "step":
            return
        for node in [node for node, after in joins.items() if content[0] >= after]:
            del joins[node]
            start(node)
        for number in [number for number, after in warned.items() if content[0] >= after]:
            del warned[number]
            job.members[number].terminate()

    with Job(steps, folder=folder, joins=[after for after in joins.values() if after < steps], **options) as job:
        for node in nodes:
            start(node)
        return job.run(at_message)
