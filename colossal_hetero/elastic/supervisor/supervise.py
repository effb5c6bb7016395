"""Run the workers of one node until all have ended: start failed ones again, forward signals, pass on output.

Decisions are in :mod:`.decisions`. This process has one thread: everything happens in :meth:`Supervisor.run`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..environment import ElasticEnvironment
from .decisions import Action, NodeProgress, after_exit, describe_status, exit_status
from .descendants import end_group
from .output import Passage, write_all
from .worker import WorkerProcess, worker_environment

__all__ = ["Launch", "Supervisor", "say"]


@dataclass(frozen=True)
class Launch:
    """What to run on a node."""

    command: Sequence[str]
    """The program of each worker and its arguments."""
    node: ElasticEnvironment
    """The place of the node's first worker."""
    max_restarts: int
    """How often each worker is started again."""
    grace_seconds: float
    """Time from the first signal until workers that have not ended are killed."""


def say(words: str) -> None:
    """Write a message of the supervisor to standard error."""
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
        """Run the workers to their end; the exit status."""
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
        """Let the end of a child wake the selector."""
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
        """Send a signal that asks all workers to end."""
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
