"""Run Python commands, such as torchrun and the workers that it starts, without loading modules again in each process.

A new interpreter spends five to eight seconds of CPU time on imports. Here commands are forked from the fork server of
:mod:`tests.support.harness` instead, and fork their workers or ranks from themselves. All else is as in new
interpreters: environment, session, standard streams, parents, signals, exit statuses and functions at exit.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from colossal_hetero.common import launch
from colossal_hetero.plugin.hybrid import hybrid_plugin
from tests.support.harness import PRELOAD, check_preloaded, forked_context

AS_USERS = "COLOSSAL_TEST_AS_USERS"  # the variable of commands that have the defaults of users, not those of tests


class ForkedPopen:
    """Like ``subprocess.Popen`` for ``[sys.executable, ...]`` in a new session. ``stdout`` is an open file,
    ``subprocess.PIPE`` or ``DEVNULL``; ``stderr`` an open file, or ``subprocess.STDOUT``."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: Any = None,
        stderr: Any = None,
        context: Any = None,
    ) -> None:
        assert command[0] == sys.executable
        self.stdout: TextIO | None = None
        if stdout is subprocess.PIPE:
            reader, writer = os.pipe()
            self.stdout = os.fdopen(reader)
        else:
            opened = os.open(os.devnull, os.O_WRONLY) if stdout is subprocess.DEVNULL else stdout
            writer = opened if isinstance(opened, int) else os.dup(opened.fileno() if opened else 1)
        streams = [Connection(writer, readable=False)]
        error = writer if stderr is subprocess.STDOUT else stderr.fileno() if stderr else 2
        streams.append(Connection(os.dup(error), readable=False))
        context = context or forked_context()
        self._process = context.Process(target=_run, args=(streams, dict(env), command[1:]))
        self._process.start()
        for stream in streams:
            stream.close()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def forked_output(*command: object) -> str:
    """What ``python COMMAND...`` prints, whose exit status must be 0. Ranks that it starts are forked too."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    arguments = [sys.executable, *map(str, command)]
    process = ForkedPopen(arguments, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    with process.stdout:
        text = process.stdout.read()
    assert process.wait(30) == 0, text
    return text


def _run(streams: Sequence[Connection], environment: Mapping[str, str], arguments: Sequence[str]) -> None:
    check_preloaded()
    os.setsid()
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    _leave_sockets()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of torchrun
    os.environ.clear()
    os.environ.update(environment)
    if AS_USERS in environment:
        logging.getLogger().handlers.clear()
        hybrid_plugin.DEFAULT_BALANCE = sys.modules[PRELOAD].USERS_BALANCE
    popen: Any = partial(ForkedPopen, context=multiprocessing.get_context("fork"))
    launch.START_METHOD = "fork"
    SubprocessHandler._popen = lambda handler, *started: popen(*started, handler._stdout, handler._stderr)  # type: ignore
    arguments = [each for each in arguments if each != "-u"]
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _leave_sockets() -> None:
    """A worker must not keep those of torchrun's store alive. Their numbers stay in use, unlike after ``exec``."""
    null = os.open(os.devnull, os.O_RDWR)
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                os.dup2(null, int(path.name))
