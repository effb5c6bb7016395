"""Which rank is named when a connection is lost. Several ranks are in one process; an ended one stops listening."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from colossal_hetero.common import ranks
from colossal_hetero.common.ranks import Address, RankWatch, is_lost_connection, name_ended_ranks, naming_ended_ranks

GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:30331. This may "
    "indicate that the peer has crashed"
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely."
)
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
ABORTED = "NCCL communicator was aborted on rank 0."
RESET = "Connection reset by peer"


def make_watches(count: int, host: Callable[[int], str] = lambda rank: "here") -> list[RankWatch]:
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
    addresses = [Address(host(rank), "127.0.0.1", each.getsockname()[1]) for rank, each in enumerate(listeners)]
    return [RankWatch(rank, listener, addresses) for rank, listener in enumerate(listeners)]


@pytest.fixture
def three() -> Iterator[list[RankWatch]]:
    watches = make_watches(3)
    yield watches
    for watch in watches:
        watch.close()


@pytest.mark.parametrize("words", [GLOO, NCCL, WATCHDOG, ABORTED, RESET])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_the_error_begins_with_the_rank_that_has_ended(three: list[RankWatch], words: str, victim: int) -> None:
    three[victim].close()
    for rank in {0, 1, 2} - {victim}:
        with pytest.raises(torch.distributed.DistBackendError) as error, naming_ended_ranks(three[rank]):
            raise torch.distributed.DistBackendError(words)
        assert str(error.value).startswith(f"rank {victim} has ended, and ")
        assert str(error.value).endswith(words)


def test_a_rank_that_ended_because_of_another_is_not_named(three: list[RankWatch]) -> None:
    three[1].close()
    assert three[0].ended() == [1]  # tells rank 2
    three[0].close()
    assert three[2].ended() == [1]


def test_ranks_that_ended_together_are_named_together() -> None:
    watches = make_watches(4)
    watches[1].close()
    watches[3].close()
    with pytest.raises(RuntimeError, match=r"^ranks 1, 3 have ended"), naming_ended_ranks(watches[2]):
        raise RuntimeError(GLOO)
    assert watches[0].ended() == [1, 3]


def test_without_an_ended_rank_the_error_stays_as_it_is(three: list[RankWatch]) -> None:
    assert three[0].ended(patience_seconds=0.05) == []
    three[1].close()
    with (
        pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied$"),
        naming_ended_ranks(three[0]),
    ):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer$"), naming_ended_ranks():
        raise RuntimeError("Connection closed by peer")  # nobody watches


def test_a_rank_is_named_once(three: list[RankWatch]) -> None:
    three[2].close()
    with pytest.raises(RuntimeError) as error, naming_ended_ranks(three[0]), naming_ended_ranks(three[0]):
        raise RuntimeError(GLOO)
    assert str(error.value).count("has ended") == 1


def test_a_loopback_address_of_another_machine_is_not_watched() -> None:
    watches = make_watches(3, host=lambda rank: f"machine {rank // 2}")
    assert watches[0].watched == {1} and watches[2].watched == set()
    for watch in watches:
        watch.close()


def test_ranks_that_do_not_answer_at_the_start_are_not_watched() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1)
    here = Address("here", "127.0.0.1", listener.getsockname()[1])
    watch = RankWatch(0, listener, [here, Address("here", "127.0.0.1", port)])
    assert watch.watched == set() and watch.ended(patience_seconds=0.05) == []
    watch.close()


@pytest.mark.parametrize("message", [b"", b"nonsense\n", b"1 has lost \n", b"\xff" * 4096])
def test_other_messages_are_ignored(three: list[RankWatch], message: bytes) -> None:
    port = three[0]._listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(message)
    three[2].close()
    assert three[0].ended() == [2]


def test_lost_connections_are_told_from_other_errors() -> None:
    assert all(map(is_lost_connection, (GLOO, NCCL, WATCHDOG, ABORTED, RESET)))
    assert not is_lost_connection("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_worker_does_not_answer_for_a_rank_that_has_ended(
    three: list[RankWatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data loader forks its workers, which hold the open files of the rank and end some seconds after it."""
    monkeypatch.setattr(ranks, "_watch", three[1])
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    try:
        three[1].close()
        assert three[0].ended() == [1]
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


class FakeOptimizer:
    """Its methods fail like a collective of NCCL."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise RuntimeError(NCCL)

        return fail


class FakeModel(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(WATCHDOG)


def test_forward_backward_and_step_name_the_rank(three: list[RankWatch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_watch", three[0])
    model, optimizer = FakeModel(), FakeOptimizer()
    name_ended_ranks(model, optimizer)
    three[1].close()
    with pytest.raises(RuntimeError, match=r"^rank 1 has ended"):
        model(torch.zeros(1))
    for method in ranks.METHODS:
        with pytest.raises(RuntimeError, match=r"^rank 1 has ended"):
            getattr(optimizer, method)()
