"""Run of a node's workers until all have ended: restarts, signals, output. One thread, :meth:`Supervisor.run`."""

from __future__ import annotations

import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial

from ..environment import ElasticEnvironment
from .descendants import end_group, end_with_parent

__all__ = [
    "Action",
    "Launch",
    "LineSplitter",
    "NodeProgress",
    "Passage",
    "Supervisor",
    "WorkerProcess",
    "after_exit",
    "describe_status",
    "exit_status",
    "python_command",
    "say",
    "shell_status",
    "worker_environment",
    "write_all",
]


# Decisions -----------------------------------------------------------------------------------------------------------


class Action(Enum):
    NOTHING = auto()
    RESTART = auto()
    END_ALL = auto()
    """Other workers of the node are asked to end."""


@dataclass(frozen=True)
class NodeProgress:
    """Progress of the workers of one node; statuses are those of ``subprocess``: ``-n`` for signal ``n``."""

    max_restarts: int
    restarts: tuple[int, ...]
    """Restarts so far, by local rank."""
    statuses: tuple[int | None, ...]
    """Statuses of workers that ended for good, by local rank; None while they run."""
    is_ending: bool = False
    """True if all workers were asked to end, so that none is started again."""
    first_failure: int | None = None
    """The status of the first worker that ended for good with an error."""

    @classmethod
    def start(cls, workers: int, max_restarts: int) -> NodeProgress:
        return cls(max_restarts, (0,) * workers, (None,) * workers)

    @property
    def is_over(self) -> bool:
        return None not in self.statuses


def after_exit(progress: NodeProgress, local_rank: int, status: int) -> tuple[NodeProgress, Action]:
    """Progress after the worker ``local_rank`` has ended with ``status``, and the action that follows."""
    if status != 0 and not progress.is_ending and progress.restarts[local_rank] < progress.max_restarts:
        restarts = list(progress.restarts)
        restarts[local_rank] += 1
        return replace(progress, restarts=tuple(restarts)), Action.RESTART
    statuses = list(progress.statuses)
    statuses[local_rank] = status
    progress = replace(progress, statuses=tuple(statuses))
    if status == 0:
        return progress, Action.NOTHING
    if progress.first_failure is None:
        progress = replace(progress, first_failure=status)
    if progress.is_ending:
        return progress, Action.NOTHING
    return replace(progress, is_ending=True), Action.END_ALL


def exit_status(progress: NodeProgress) -> int:
    """Exit status of the supervisor: 0 if all workers ended with 0, else that of the first failure, as in a shell."""
    return shell_status(progress.first_failure or 0)


def shell_status(status: int) -> int:
    """The exit status that a shell shows: ``128 + n`` for a process that was ended by signal ``n``."""
    return 128 - status if status < 0 else status


def describe_status(status: int) -> str:
    """``exit status 3`` or ``signal 9 (SIGKILL)``."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        return f"signal {-status}"


# Output --------------------------------------------------------------------------------------------------------------


MAX_LINE_BYTES = 64 * 1024
MAX_LAST_LINES = 20


class LineSplitter:
    """Divides bytes that arrive in pieces into lines, which keep their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, piece: bytes) -> list[bytes]:
        """Lines that are complete now. A line of more than ``MAX_LINE_BYTES`` counts as complete."""
        complete = (self._rest + piece).splitlines(keepends=True)
        self._rest = b""
        # Progress bars end a line with a carriage return. At the end of the bytes, it may be the first half of \r\n.
        if complete and not complete[-1].endswith(b"\n") and len(complete[-1]) <= MAX_LINE_BYTES:
            self._rest = complete.pop()
        return complete

    def last_line(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest


class Passage:
    """Passes one stream of one worker on, with ``prefix`` in front of each line; without one, unchanged and at once."""

    def __init__(self, target: int, prefix: str = "") -> None:
        self._target = target
        self._prefix = prefix.encode()
        self._splitter = LineSplitter()
        self._last_lines: deque[bytes] = deque(maxlen=MAX_LAST_LINES)

    def pass_on(self, piece: bytes) -> None:
        lines = self._splitter.lines(piece)
        self._last_lines.extend(lines)
        write_all(self._target, b"".join(self._prefix + line for line in lines) if self._prefix else piece)

    def close(self) -> None:
        line = self._splitter.last_line()
        if line:
            self._last_lines.append(line)
            if self._prefix:
                write_all(self._target, self._prefix + line.rstrip(b"\r") + b"\n")

    def last_lines(self) -> list[str]:
        return [line.decode(errors="replace").rstrip("\r\n") for line in self._last_lines]


def write_all(target: int, text: bytes) -> None:
    """Write ``text``. If that fails, drop the rest: training goes on when nobody reads or the disk is full."""
    while text:
        try:
            text = text[os.write(target, text) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return


# Worker --------------------------------------------------------------------------------------------------------------


OF_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that name one fixed world. Workers do not inherit them, nor those that begin with ``TORCHELASTIC_``."""


def python_command(script: str, arguments: Sequence[str], is_module: bool = False) -> list[str]:
    """The command of a worker, with output that is not buffered; ``script`` may be the name of a module."""
    return [sys.executable, "-u", *(["-m"] if is_module else []), script, *arguments]


def worker_environment(inherited: Mapping[str, str], place: ElasticEnvironment) -> dict[str, str]:
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in OF_OTHER_LAUNCHERS and not name.startswith("TORCHELASTIC_")
    }
    return {"OMP_NUM_THREADS": "1", **kept, **place.variables()}


class WorkerProcess:
    """A running worker in its own process group; it ends with this process. Its standard input is empty."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], passages: tuple[Passage | None, Passage]
    ) -> None:
        parent = os.getpid()

        def prepare() -> None:
            os.setpgid(0, 0)
            end_with_parent(parent)

        # This process has one thread, so a function may run between fork and exec.
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=None if passages[0] is None else subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=prepare,
        )
        self.pid = self._process.pid
        self.errors = passages[1]
        pipes = [(self._process.stdout, passages[0]), (self._process.stderr, passages[1])]
        self._streams = {pipe.fileno(): passage for pipe, passage in pipes if pipe is not None and passage is not None}
        for stream in self._streams:
            os.set_blocking(stream, False)

    @property
    def streams(self) -> tuple[int, ...]:
        return tuple(self._streams)

    def pass_on(self, stream: int) -> bool:
        """Pass on what can be read from ``stream`` now; false when nobody can write to it any more."""
        try:
            piece = os.read(stream, 1 << 16)
        except BlockingIOError:
            return True
        self._streams[stream].pass_on(piece)
        return piece != b""

    def send(self, number: int) -> None:
        """Send a signal to the worker itself, not to processes that it has started."""
        os.kill(self.pid, number)

    def close(self, status: int) -> None:
        """Pass on the last output of a worker that has ended with ``status``, read by somebody else, like its group."""
        self._process.returncode = status
        for stream, passage in self._streams.items():
            while (piece := _available(stream)) != b"":
                passage.pass_on(piece)
            passage.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _available(stream: int) -> bytes:
    try:
        return os.read(stream, 1 << 16)
    except BlockingIOError:  # a process that has left the group could still write
        return b""


@dataclass(frozen=True)
class Launch:
    command: Sequence[str]
    node: ElasticEnvironment
    """The place of the node's first worker."""
    max_restarts: int
    grace_seconds: float
    """Time from the first signal until workers that have not ended are killed."""


def say(words: str) -> None:
    write_all(2, f"colossal-hetero launch: {words}\n".encode())


class Supervisor:
    """Starts and watches workers. ``requests`` receives the numbers of signals for the workers, one byte each."""

    def __init__(self, launch: Launch, requests: socket.socket) -> None:
        self._launch = launch
        self._requests = requests
        count = launch.node.local_world_size
        self._progress = NodeProgress.start(count, launch.max_restarts)
        self._workers: dict[int, WorkerProcess] = {}
        self._kill_at: float | None = None
        self._last_words: list[str] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        self._watch_children()
        self._selector.register(self._requests, selectors.EVENT_READ, self._forward_requests)
        for local_rank in range(self._launch.node.local_world_size):
            self._start(local_rank)
        while not self._progress.is_over:
            for key, _ in self._selector.select(self._seconds_to_kill()):
                if key.fd in self._selector.get_map():
                    key.data()
            self._read_statuses()
            self._kill_late_workers()
        for line in self._last_words:
            say(line)
        return exit_status(self._progress)

    def _watch_children(self) -> None:
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))

    def _start(self, local_rank: int) -> None:
        node = self._launch.node
        is_single = node.local_world_size == 1
        prefix = "" if is_single else f"[{node.node}/{local_rank}] "
        passages = (None if is_single else Passage(1, prefix), Passage(2, prefix))
        environment = worker_environment(os.environ, replace(node, local_rank=local_rank))
        worker = WorkerProcess(self._launch.command, environment, passages)
        self._workers[local_rank] = worker
        for stream in worker.streams:
            self._selector.register(stream, selectors.EVENT_READ, partial(self._pass_on, worker, stream))

    def _pass_on(self, worker: WorkerProcess, stream: int) -> None:
        if not worker.pass_on(stream):
            self._selector.unregister(stream)

    def _forward_requests(self) -> None:
        numbers = self._requests.recv(64)
        if not numbers:  # the guard has ended, and this process receives a signal for that
            self._selector.unregister(self._requests)
        for number in numbers:
            self._end_all(number)

    def _end_all(self, number: int) -> None:
        self._progress = replace(self._progress, is_ending=True)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._launch.grace_seconds
        for worker in self._workers.values():
            worker.send(number)

    def _seconds_to_kill(self) -> float | None:
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _kill_late_workers(self) -> None:
        if self._kill_at is None or time.monotonic() < self._kill_at or not self._workers:
            return
        for local_rank, worker in self._workers.items():
            say(f"worker {local_rank} is killed: it did not end within {self._launch.grace_seconds:g} s (--grace)")
            worker.send(signal.SIGKILL)
        self._kill_at = None

    def _read_statuses(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            ranks = [rank for rank, worker in self._workers.items() if worker.pid == ended.si_pid]
            if ranks:  # while its status is not read, nobody else can get the number of its group
                end_group(ended.si_pid)
            status = os.waitstatus_to_exitcode(os.waitpid(ended.si_pid, 0)[1])
            if ranks:
                self._after_exit(ranks[0], status)

    def _after_exit(self, local_rank: int, status: int) -> None:
        worker = self._workers.pop(local_rank)
        for stream in worker.streams:
            if stream in self._selector.get_map():
                self._selector.unregister(stream)
        worker.close(status)
        self._progress, action = after_exit(self._progress, local_rank, status)
        how = f"worker {local_rank} (process {worker.pid}) ended with {describe_status(status)}"
        if action is Action.RESTART:
            restarts = self._progress.restarts[local_rank]
            say(f"{how}; started again, restart {restarts} of {self._launch.max_restarts}")
            self._start(local_rank)
        elif action is Action.END_ALL:
            lines = worker.errors.last_lines()
            how += f" after {self._launch.max_restarts} restarts (--max-restarts)"
            heading = "the last lines of its stderr:" if lines else "it has written nothing to stderr"
            self._last_words = [f"{how}; {heading}", *(f"  {line}" for line in lines)]
            say(f"{how}; all workers of this node are asked to end")
            self._end_all(signal.SIGTERM)
