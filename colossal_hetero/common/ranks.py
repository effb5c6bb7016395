"""Name the ranks that have ended, where a collective fails because of them.

[Note: ended ranks] When the process of a rank ends, the collectives of all others fail, with words of Gloo or NCCL that
name a port or nothing. So every rank listens on a port that all others know. It never accepts a connection while it
trains: the operating system does, for as long as the process lives, however busy it is. If a collective fails, a rank
tries to connect to all others; an ended one refuses. Before the rank raises its error and ends itself, it sends the
names of the ended ranks to all that live: a rank that has sent such a message is not the cause.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from .text import print_words

PATIENCE_SECONDS = 1.0
"""Longest search for an ended rank: a connection may be closed a moment before the process has ended."""
PAUSE_SECONDS = 0.02
"""Pause after the first attempt; it doubles after each."""
ANSWER_SECONDS = 0.5
"""Time in which the operating system of a rank that lives answers."""
AT_ONCE = 200
"""Number of connections that are opened at once; a process may usually have 1,024 open files."""
METHODS = ("backward", "step", "clip_grad_by_norm", "clip_grad_by_value", "unscale_grad")

_LOST = re.compile(
    r"gloo|nccl|connection|broken pipe|socket|by peer|remote process|tcpstore|communicator", re.IGNORECASE
)
_MESSAGE = re.compile(rb"(\d+) has lost (\d+(?:,\d+)*)\n")


class Address(NamedTuple):
    host: str
    ip: str
    port: int


def is_lost_connection(words: str) -> bool:
    """True if an error message of a collective may mean that another rank has ended."""
    return _LOST.search(words) is not None


class RankWatch:
    def __init__(self, rank: int, listener: socket.socket, addresses: Sequence[Address]) -> None:
        self._rank = rank
        self._listener = listener
        listener.setblocking(False)
        here = addresses[rank].host
        # A loopback address of another machine leads to this machine.
        others = {
            number: (address.ip, address.port)
            for number, address in enumerate(addresses)
            if number != rank and (address.host == here or not address.ip.startswith(("127.", "::1")))
        }
        # A rank behind a firewall cannot be told from one that has ended, so only those that answer now are watched.
        self._others = {number: others[number] for number in _attempt(others, ANSWER_SECONDS).connected}

    @property
    def watched(self) -> frozenset[int]:
        return frozenset(self._others)

    def close(self) -> None:
        self._listener.close()

    def ended(self, patience_seconds: float = PATIENCE_SECONDS) -> list[int]:
        """The ranks that have ended and caused a lost connection, ascending; told to the ranks that live."""
        deadline, pause = time.monotonic() + patience_seconds, PAUSE_SECONDS
        told: dict[int, set[int]] = {}
        while True:
            told |= self._read()
            answers = _attempt(self._others, ANSWER_SECONDS)
            causes = (answers.refused | set().union(*told.values())) - told.keys() - {self._rank}
            if causes:
                self._tell(answers.connected, causes)
                return sorted(causes)
            if time.monotonic() >= deadline:
                return []
            time.sleep(pause)
            pause *= 2

    def _read(self) -> dict[int, set[int]]:
        """Messages that have arrived since the last call: the sender, and the ranks that it has lost."""
        found: dict[int, set[int]] = {}
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # nobody waits, or this rank has stopped listening
                return found
            with connection:
                connection.settimeout(ANSWER_SECONDS)
                try:
                    message = _MESSAGE.fullmatch(connection.recv(1 << 16))
                except OSError:
                    continue
            if message is not None:
                found[int(message[1])] = {int(number) for number in message[2].split(b",")}

    def _tell(self, ranks: Collection[int], causes: Collection[int]) -> None:
        message = f"{self._rank} has lost {','.join(map(str, sorted(causes)))}\n".encode()
        for number in ranks:
            try:
                with socket.create_connection(self._others[number], ANSWER_SECONDS) as connection:
                    connection.sendall(message)
            except OSError:
                continue  # it has ended meanwhile


class _Answers(NamedTuple):
    connected: set[int]
    refused: set[int]


def _attempt(addresses: Mapping[int, tuple[str, int]], seconds: float) -> _Answers:
    """Ranks that accept a connection, and ranks that refuse it; the others do not answer within ``seconds``."""
    answers = _Answers(set(), set())
    ranks = list(addresses)
    for first in range(0, len(ranks), AT_ONCE):
        with selectors.DefaultSelector() as selector:
            for rank in ranks[first : first + AT_ONCE]:
                ip, port = addresses[rank]
                attempt = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
                attempt.setblocking(False)
                attempt.connect_ex((ip, port))
                selector.register(attempt, selectors.EVENT_WRITE, rank)
            deadline = time.monotonic() + seconds
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    attempt = key.fileobj  # type: ignore[assignment]
                    status = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if status == 0:
                        answers.connected.add(key.data)
                    elif status in (errno.ECONNREFUSED, errno.ECONNRESET):
                        answers.refused.add(key.data)
                    selector.unregister(attempt)
                    attempt.close()
                if time.monotonic() >= deadline:
                    break
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    return answers


_watch: RankWatch | None = None


def watch_ranks() -> RankWatch:
    """Let all ranks watch each other from now on. Every rank calls it."""
    global _watch
    if _watch is not None:
        _watch.close()
    ip = own_address()
    listener = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    listener.bind((ip, 0))
    listener.listen(4096)
    addresses = of_every_rank(Address(socket.gethostname(), ip, listener.getsockname()[1]))
    _watch = RankWatch(dist.get_rank(), listener, addresses)
    return _watch


def own_address() -> str:
    """Address of this machine toward ``MASTER_ADDR``; a loopback address if that is here or cannot be reached."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _close_in_child() -> None:
    # A worker of a data loader must not answer for a rank that has ended.
    if _watch is not None:
        _watch.close()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def naming_ended_ranks(watch: RankWatch | None = None) -> Iterator[None]:
    """If the block raises because another rank has ended, begin the message with that rank; type and traceback remain.
    Without a call of :func:`watch_ranks`, whose watch is the default, nothing changes."""
    try:
        yield
    except RuntimeError as error:
        _name(error, watch or _watch)
        raise


def _name(error: BaseException, watch: RankWatch | None) -> None:
    words = str(error)
    if watch is None or not is_lost_connection(words) or "ended, and the other ranks" in words:
        return
    ended = watch.ended()
    if ended:
        numbers = ", ".join(map(str, ended))
        have = f"rank {numbers} has" if len(ended) == 1 else f"ranks {numbers} have"
        error.args = (
            f"{have} ended, and the other ranks cannot continue alone; look for the reason in the output of rank "
            f"{ended[0]}, and start again from the latest checkpoint. The error on this rank: {words}",
        )


def name_ended_ranks(model: nn.Module, optimizer: Any) -> None:
    """Name the ranks that have ended in errors in the forward pass of ``model`` and in methods of ``optimizer``.

    Call it after everything else that replaces methods of the optimizer, a wrapper of Colossal-AI's.
    """
    model.register_forward_hook(_name_in_forward, always_call=True)
    for name in METHODS:
        setattr(optimizer, name, naming_ended_ranks()(getattr(optimizer, name)))


def _name_in_forward(model: nn.Module, inputs: Any, output: Any) -> None:
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError):
        _name(error, _watch)


# Every rank ----------------------------------------------------------------------------------------------------------

T = TypeVar("T")


def check_launched() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "the ranks are not connected yet: call colossalai.launch_from_torch() before you make the plugin, and "
            "start the script with torchrun, as in: torchrun --standalone --nproc-per-node 2 train.py"
        )


def of_every_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of each rank (of ``group``), by rank. Every rank calls it."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def from_rank_0(function: Callable[[], T], kind: type[ValueError] = ValueError) -> T:
    """The result of ``function``, which only rank 0 calls; every rank gets it. If ``function`` raises an error, all
    ranks raise one with the same message: the others ``kind`` if the error is of that type, else ``ValueError``."""
    answer: list[Any] = [None, None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:  # any error: the other ranks wait for the answer
            failure = error
            answer[1:] = str(error), kind if isinstance(error, kind) else ValueError
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise failure or answer[2](answer[1])
    return answer[0]  # type: ignore[no-any-return]


def print_on_rank_0(message: str) -> None:
    if dist.get_rank() == 0:
        print_words(message)


def on_every_rank(function: Callable[[], T], purpose: str) -> list[T]:
    """The results of ``function`` by rank; it is called on every rank, and must not call collectives."""
    failure: Exception | None = None
    outcome: tuple[Any, str | None]
    try:
        outcome = function(), None
    except Exception as error:
        failure, outcome = error, (None, f"{type(error).__name__}: {error}")
    with naming_ended_ranks():
        everyone: list[tuple[Any, str | None]] = of_every_rank(outcome)
    failures = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(everyone) if words is not None]
    if failures:
        raise RuntimeError(f"{purpose} failed on {'; '.join(failures)}") from failure
    return [value for value, _ in everyone]


# Group destruction ---------------------------------------------------------------------------------------------------
# Destroy Gloo's process groups without Python's global interpreter lock. When a collective has returned, a thread of
# Gloo still holds its tensors for a moment, and may have to release them, for which it needs the lock. The destructor
# of a group waits for these threads. ``ProcessGroup`` of torch 2.5 runs it with the lock, and then both wait forever;
# ``ProcessGroupGloo``, the backend, gives the lock back before. So the backend is kept until the group is gone. torch
# makes every group in a private function, ``_new_process_group_helper``, which is wrapped here.


@functools.cache
def destroy_without_lock() -> None:
    """Destroy all groups of this process, also those that exist already, without the lock from now on."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    for group in distributed_c10d._world.pg_map:
        _keep_backends(group)
    new_group = distributed_c10d._new_process_group_helper

    @functools.wraps(new_group)
    def kept(*args: Any, **kwargs: Any) -> Any:
        group, store = new_group(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # and not the mark of a group that this rank is not in
            _keep_backends(group)
        return group, store

    distributed_c10d._new_process_group_helper = kept


def _keep_backends(group: dist.ProcessGroup) -> None:
    backends = [group._get_backend(device) for device in group._device_types]
    kept = [each for each in backends if isinstance(each, dist.ProcessGroupGloo)]
    weakref.finalize(group, kept.clear)


def world_timeout() -> timedelta | None:
    """Time that ranks wait for each other in the default group, for other groups; None for torch's own choice."""
    group = dist.group.WORLD
    assert group is not None
    options: list[Any] = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    timeouts = [each._timeout for each in options if hasattr(each, "_timeout")]
    usual = distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend()))
    return timeouts[0] if timeouts and timeouts[0] != usual else None
