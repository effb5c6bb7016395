"""Processes that are members of a job and add up numbers, to be killed, frozen and warned."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from colossal_hetero.elastic.world import Failure, World
from tests.support.harness import _context

SUMS = 3
"""A node tells its world when it has added up so many times."""


class Formation(NamedTuple):
    """A world of a node, and how the one before has ended."""

    world: World
    failure: Failure | None
    gone: tuple[str, ...]
    joined: tuple[str, ...]


class Event(NamedTuple):
    """What a node has told."""

    seconds: float
    """When, since 1970."""
    kind: str
    """``up``; ``formed``, with all its formations up to now; ``error``; ``departed``; or ``ended``, with the words of a
    MembershipError."""
    value: Any


def _start_worker() -> None:
    """A process that has this one's connections, as a worker of a data loader does, and ends 3 s after it."""
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.2)
        time.sleep(3)
        os._exit(0)


def _check_launched(world: World) -> None:
    """This process is in the state in which ``colossalai.launch`` leaves it, and leaves something behind itself."""
    import torch
    import torch.distributed as dist
    from colossalai.cluster import DistCoordinator
    from colossalai.pipeline import p2p
    from colossalai.shardformer.layer.utils import Randomizer

    coordinator = DistCoordinator()
    places = [coordinator.rank, coordinator.world_size, coordinator.local_rank]
    assert places == [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    assert places == [dist.get_rank(), dist.get_world_size(), 0] == [world.rank, world.size, 0]
    assert Randomizer._INDEX == 0
    Randomizer.increment_index()
    if world.size > 1:  # a message that nobody receives
        p2p.dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(9), (world.rank + 1) % world.size)])


def _node_main(pipe: Any, port: int, name: str, options: dict[str, Any], has_worker: bool) -> None:  # noqa: C901
    import torch
    import torch.distributed as dist

    from colossal_hetero.elastic.membership import Membership
    from colossal_hetero.elastic.world import MembershipError

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    warned: list[int] = []
    formations: list[Formation] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: warned.append(number))

    def tell(kind: str, value: Any = None) -> None:
        pipe.send_bytes(pickle.dumps(Event(time.time(), kind, value)))

    def add_up(membership: Membership) -> None:
        """Until somebody is warned or waits. Each step says so to all, with the numbers that are added up."""
        world = membership.world
        pairs = [dist.new_group([rank, (rank + 1) % world.size]) for rank in range(world.size) if world.size > 1]
        membership.seal()
        _check_launched(world)
        if has_worker:
            _start_worker()
        step = 0
        while True:
            waits = world.rank == 0 and membership.is_somebody_waiting()
            word = torch.tensor([world.rank + 1.0, float(bool(warned)), float(waits)])
            for rank, pair in enumerate(pairs):
                if world.rank in (rank, (rank + 1) % world.size):
                    dist.all_reduce(torch.ones(1), group=pair)
            dist.all_reduce(word)
            assert word[0] == world.size * (world.size + 1) / 2, word
            step += 1
            if step == SUMS:
                tell("formed", formations)
            if word[1] or word[2]:
                return
            time.sleep(0.002)

    try:
        membership = Membership("127.0.0.1", port, "job", **{"node": name, **options})
        tell("up")
        while True:
            failure, before = membership.failure, formations[-1].world.nodes if formations else None
            now = membership.form()
            gone = tuple(node for node in before or () if node not in now.nodes)
            joined = tuple(node for node in now.nodes if before is not None and node not in before)
            formations.append(Formation(now, failure, gone, joined))
            try:
                add_up(membership)
            except RuntimeError as error:
                tell("error", str(error))
                membership.fail(str(error))
            membership.leave()
            if warned:
                if signal.SIGUSR1 in warned:
                    membership.end_job()
                membership.depart()
                tell("departed")
                return
    except MembershipError as error:
        tell("ended", f"{type(error).__name__}: {error}")
    except BaseException:
        tell("crashed", traceback.format_exc())


def _serve(pipe: Any) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send_bytes(pickle.dumps(store.port))
    signal.pause()


class Nodes:
    """A store and nodes, each a process of its own. Nodes are known by their names.

    A node that gets SIGTERM departs; with SIGUSR1 it ends the job first.

    Args:
        has_worker: Whether each node starts another process, which gets its connections.
        options: of each node's ``Membership``.
    """

    def __init__(self, has_worker: bool = False, **options: Any) -> None:
        self._has_worker, self._options = has_worker, options
        self._processes: dict[str, Any] = {}
        self._pipes: dict[str, Any] = {}
        self.events: dict[str, list[Event]] = {}
        self._start("store", _serve)
        self._port = pickle.loads(self._pipes.pop("store").recv_bytes())

    def _start(self, name: str, function: Any, *arguments: Any) -> None:
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=function, args=(sender, *arguments), daemon=True)
        process.start()
        sender.close()
        self._processes[name], self._pipes[name] = process, receiver

    def start(self, *names: str, **options: Any) -> None:
        """Start nodes, without a wait; ``options`` are more options of their ``Membership``."""
        for name in names:
            self.events[name] = []
            self._start(name, _node_main, self._port, name, self._options | options, self._has_worker)

    def signal(self, name: str, number: int) -> float:
        """Send a signal to a node, or to ``store``; the time."""
        os.kill(self._processes[name].pid, number)
        return time.time()

    def kill(self, name: str) -> None:
        """End a node as if its machine lost power."""
        self.signal(name, signal.SIGKILL)

    def kinds(self, name: str) -> list[str]:
        """The kinds of events that a node has told."""
        self._read(0.0)
        return [event.kind for event in self.events[name]]

    def wait_for(self, name: str, kind: str, after: int = 0) -> Event:
        """The first event of this kind that a node tells, from its event number ``after`` on."""
        return self._wait(lambda: next((e for e in self.events[name][after:] if e.kind == kind), None), 20.0)

    def wait_for_world(self, *names: str, others: int = 0, seconds: float = 20.0) -> dict[str, Formation]:
        """Wait until exactly these nodes, and so many others, are in one world and have added up right.

        Returns:
            The latest ``Formation`` of each of them.
        """

        def formed() -> dict[str, Formation] | None:
            last = {
                name: events[-1].value[-1]
                for name, events in self.events.items()
                if events and events[-1].kind == "formed"
            }
            if names[0] not in last:
                return None
            world = last[names[0]].world
            if not set(names) <= set(world.nodes) <= set(last) or world.size != len(names) + others:
                return None
            formations = {name: last[name] for name in world.nodes}
            agree = all(world == each.world._replace(rank=world.rank) for each in formations.values())
            return formations if agree else None

        return self._wait(formed, seconds)

    def formations(self, name: str) -> list[Formation]:
        """How the worlds of a node formed, also those that broke before it added up."""
        told = [event.value for event in self.events[name] if event.kind == "formed"]
        return told[-1] if told else []

    def _wait(self, look: Any, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while (found := look()) is None:
            if time.monotonic() > deadline:
                last = {name: [str(event.value) for event in events[-3:]] for name, events in self.events.items()}
                raise TimeoutError(f"not within {seconds} s; the last events are {last}")
            self._read(0.2)
        return found

    def _read(self, seconds: float) -> None:
        while ready := wait(list(self._pipes.values()), seconds):
            seconds = 0.0
            for name, pipe in list(self._pipes.items()):
                if pipe not in ready:
                    continue
                try:
                    event = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # it has ended
                    del self._pipes[name]
                    continue
                assert event.kind != "crashed", f"{name}: {event.value}"
                self.events[name].append(event)
            if not self._pipes:
                return

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join(10)
        assert not any(process.is_alive() for process in self._processes.values())


@contextmanager
def running_nodes(names: Iterable[str], **options: Any) -> Iterator[Nodes]:
    """A store and these nodes, which have formed a world. At the end of the ``with`` block all processes are ended."""
    nodes = Nodes(**options)
    try:
        names = list(names)
        nodes.start(*names)
        nodes.wait_for_world(*names)
        yield nodes
    finally:
        nodes.close()
