"""The supervisor's client of the store against torch's own, and who may have the name of a node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from colossal_hetero.elastic.job_store import start_store
from colossal_hetero.elastic.supervisor import guard
from colossal_hetero.elastic.supervisor.guard import NameTaken, NodeName, StoreClient

KEY = "colossal_hetero/nodes/job/n1"


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(guard, "POLL_SECONDS", 0.02)


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield start_store("127.0.0.1", 0)[0]


def holder(store: TCPStore, said: list[str] | None = None) -> NodeName:
    return NodeName("127.0.0.1", store.port, "job", "n1", (said if said is not None else []).append)


@pytest.mark.parametrize("use_libuv", [True, False])
def test_the_client_does_what_that_of_torch_does(use_libuv: bool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=use_libuv)
    client = StoreClient("127.0.0.1", server.port)
    for key, expected, desired in [("a", "x", "1"), ("a", "", "2"), ("a", "", "3"), ("a", "2", "4"), ("b", "", "ü")]:
        ours = client.compare_set(f"ours/{key}", expected, desired)
        assert ours == server.compare_set(f"theirs/{key}", expected, desired).decode(), (key, expected, desired)
    assert server.get("ours/a").decode() == "4" and server.get("ours/b").decode() == "ü"
    client.compare_set("long", "", "c" * 300_000)
    assert client.compare_set("long", "", "") == "c" * 300_000
    client.close()


def test_what_is_no_store_is_an_error() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            over.wait()
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match=r"no answer of the store at 127.0.0.1:\d+: .* not a store of torch"):
            StoreClient("127.0.0.1", server.getsockname()[1]).compare_set("a", "", "b")
        over.set()
        thread.join()


def test_a_name_belongs_to_the_one_that_beats(store: TCPStore) -> None:
    first, second = holder(store), holder(store)
    first.claim(5)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            first.renew()

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(NameTaken, match=r"node 'n1' is already in job 'job': process \d+ on .*--node"):
        second.claim(5)
    stop.set()
    thread.join()
    first.renew()
    first.give_back()
    said: list[str] = []
    holder(store, said).claim(5)
    assert said == []


def test_the_name_of_a_silent_node_is_taken_over(store: TCPStore) -> None:
    said: list[str] = []
    silent, new = holder(store), holder(store, said)
    silent.claim(5)
    new.claim(5)
    new.renew()
    assert len(said) == 1 and "waiting up to 0.3 s" in said[0]
    with pytest.raises(NameTaken):
        silent.renew()


def test_a_name_survives_the_loss_of_an_answer_and_of_the_store() -> None:
    server, address = start_store("127.0.0.1", 0)
    name = holder(server)
    name.claim(5)
    value = server.get(KEY).decode()
    beat, _, who = value.partition(" ")
    server.set(KEY, f"{int(beat) + 1} {who}")  # as if the answer to the next beat had been lost
    name.renew()
    port = server.port
    del server
    for _ in range(2):
        with pytest.raises(OSError):
            name.renew()
    again, _ = start_store("127.0.0.1", port)
    name.renew()
    again.set_timeout(timedelta(seconds=5))
    assert again.get(KEY).decode().endswith(who)
    assert address.endswith(f":{port}")
