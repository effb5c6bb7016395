"""Before a world: what a worker reads from its environment, what is refused, and how workers find each other."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from colossal_hetero import BatchConfig, ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.elastic.environment import (
    ElasticEnvironment,
    TorchrunPlace,
    launcher_name,
    parse_address,
    runs_launcher,
)
from colossal_hetero.elastic.process_groups import Greeting, find_each_other
from tests.support.machines import Nodes, machines

TORCHRUN = dict(RANK="0", WORLD_SIZE="3", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", GROUP_WORLD_SIZE="1")
TORCHRUN |= dict(MASTER_ADDR="10.0.0.6", MASTER_PORT="29500")
TORCHRUN |= dict(TORCHELASTIC_RUN_ID="vit-7", TORCHELASTIC_USE_AGENT_STORE="True")
JOB = TORCHRUN | dict(
    COLOSSAL_HETERO_STORE="10.0.0.5:29400", COLOSSAL_HETERO_JOB="job-1", COLOSSAL_HETERO_NODE="node.a"
)


def test_the_place_in_a_job() -> None:
    place = ElasticEnvironment.from_environ(JOB)
    launcher = f"torchrun on {socket.gethostname()} (MASTER_PORT 29500)"
    assert place == ElasticEnvironment("10.0.0.5", 29400, "job-1", "node.a", 1, launcher)
    slurm = JOB | dict(SLURMD_NODENAME="gpu-3")
    assert ElasticEnvironment.from_environ(slurm).node == "node.a"
    del slurm["COLOSSAL_HETERO_NODE"], slurm["COLOSSAL_HETERO_JOB"]
    place = ElasticEnvironment.from_environ(slurm)
    assert (place.node, place.job) == ("gpu-3", "default")
    del slurm["SLURMD_NODENAME"]
    assert ElasticEnvironment.from_environ(slurm).node == socket.gethostname()
    assert parse_address("store.example:29400") == ("store.example", 29400)
    place = ElasticEnvironment.from_environ(JOB | dict(COLOSSAL_HETERO_STORE="[fe80::1%eth0]:1"))
    assert (place.store_host, place.store_port) == ("fe80::1%eth0", 1)
    for wrong in ("host", "host:", ":1", "::1:29400", "host:port", "host:0", "host:65536", "a b:1", "host:1\n"):
        with pytest.raises(ValueError, match="valid"):
            parse_address(wrong)


def test_wrong_environments_are_refused_in_words() -> None:
    for changes, message in (
        ({"COLOSSAL_HETERO_STORE": None}, "COLOSSAL_HETERO_STORE.*is not set.*colossal-hetero store.*torchrun"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set.*not a worker of torchrun.*torchrun --standalone"),
        ({"GROUP_WORLD_SIZE": "2"}, "has 2 nodes, and ends the workers of all.*alone.*recovery='restart'"),
        ({"COLOSSAL_HETERO_STORE": "host"}, "COLOSSAL_HETERO_STORE: 'host' does not have the form HOST:PORT"),
        ({"COLOSSAL_HETERO_NODE": "a/b"}, "'a/b' cannot be the name of a node"),
        ({"COLOSSAL_HETERO_JOB": ""}, "'' cannot be the name of a job"),
    ):
        environ = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            ElasticEnvironment.from_environ(environ)  # type: ignore[arg-type]
    # A process of nobody is told how to start.
    with pytest.raises(ValueError, match=r"RANK, MASTER_PORT is not set, .*torchrun --max-restarts"):
        TorchrunPlace.from_environ({k: v for k, v in TORCHRUN.items() if k not in ("RANK", "MASTER_PORT")})


def test_the_place_in_the_world_of_torchrun() -> None:
    environ = TORCHRUN | dict(COLOSSAL_HETERO_NODE="gpu-3")
    assert TorchrunPlace.from_environ(environ) == TorchrunPlace(0, 3, 1, "10.0.0.6", 29500, False, "gpu-3", "vit-7")
    environ = TORCHRUN | dict(TORCHELASTIC_USE_AGENT_STORE="False", COLOSSAL_HETERO_NODE="")
    place = TorchrunPlace.from_environ(environ)
    assert place.hosts_store and place.node == socket.gethostname()
    assert not TorchrunPlace.from_environ(environ | dict(RANK="1")).hosts_store
    for name in ("none", ""):  # a job without a name has that of its launcher
        job = TorchrunPlace.from_environ(TORCHRUN | dict(TORCHELASTIC_RUN_ID=name)).job
        assert job == launcher_name(os.getppid()) and runs_launcher(job)
        number, start = job.split("-")[1:]
        assert not runs_launcher(f"launcher-{number}-{int(start) + 1}")
    assert runs_launcher("a-job-with-a-name")


PLANNING = PlanConfig(cluster=machines(Nodes("InfiniBand", (1, 1))), profile="profile.json", global_batch_size=8)


def test_arguments_that_are_not_possible() -> None:
    for changes, error, message in (
        (dict(elastic="yes"), TypeError, "is not an ElasticConfig"),
        (dict(plan="plan.json"), ValueError, 'use plan="auto"'),
        (dict(planning=None), ValueError, "planning=PlanConfig"),
        (dict(planning={"cluster": "cluster.toml"}), ValueError, "planning=PlanConfig"),
        (dict(planning=PlanConfig()), ValueError, "planning=PlanConfig"),
        (dict(pp_size=2), ValueError, "pp_size=2 is not possible"),
        (dict(zero_stage=2), ValueError, "zero_stage=2 is not possible; use 0 or 1"),
        (dict(batches=BatchConfig(global_batch_size=8)), ValueError, "leave batches out"),
        (dict(enable_sequence_parallelism=True), ValueError, "sequence parallelism is not possible"),
    ):
        arguments = dict(plan="auto", planning=PLANNING, elastic=ElasticConfig()) | changes
        with pytest.raises(error, match=message):
            HeteroHybridParallelPlugin(**arguments)  # type: ignore[arg-type]


def test_options_that_are_not_possible() -> None:
    for options, message in (
        (dict(min_members=0), "min_members=0 must be"),
        (dict(min_members=True), "min_members=True must be"),
        (dict(min_members=3, max_members=2), "max_members=2 is less than min_members=3"),
        (dict(max_members=2.5), "max_members=2.5 must be a whole number"),
        (dict(max_members=True), "max_members=True must be a whole number"),
        (dict(timeout_seconds=float("inf")), "timeout_seconds=inf must be a positive number"),
        (dict(join_seconds=float("nan")), "join_seconds=nan must be a positive number"),
        (dict(start_seconds=float("inf")), "start_seconds=inf must be a number of seconds"),
        (dict(recovery="again"), 'recovery=\'again\' must be "in-process" or "restart"'),
        (dict(memory="/dev/shm/x"), 'used with recovery="restart" only'),
        (dict(recovery="restart", memory_every=0), "memory_every=0 must be a whole number"),
        (dict(dead_seconds=0.0), "dead_seconds=0.0 must be a positive number"),
    ):
        with pytest.raises(ValueError, match=message):
            ElasticConfig(**options)  # type: ignore[arg-type]


class Shared:
    """A store of torch that several threads use."""

    def __init__(self) -> None:
        self._store, self._lock = HashStore(), threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            with self._lock:
                return getattr(self._store, name)(*arguments)

        return call


def meet(store: Shared, nodes: list[str], late: int) -> list[Greeting]:
    """A world whose worker number ``late`` comes late."""
    found: dict[int, Greeting] = {}

    def worker(rank: int) -> None:
        time.sleep(0.2 * (rank == late))
        found[rank] = find_each_other(store, rank, len(nodes), nodes[rank], 20.0)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(nodes))]


def test_worlds_one_after_another_with_each_worker_late_once() -> None:
    store, tokens = Shared(), set[str]()
    for world, nodes in enumerate([["a"], ["a", "b", "c"], ["c", "a", "b"], ["b", "a"], ["a", "c", "b"], ["b", "c"]]):
        greetings = meet(store, nodes, late=world % len(nodes))
        assert {greeting.nodes for greeting in greetings} == {tuple(nodes)}
        (token,) = {greeting.token for greeting in greetings}
        tokens.add(token)
    assert len(tokens) == 6


def test_a_worker_that_does_not_come_is_waited_for_up_to_the_limit() -> None:
    for rank in (0, 1):
        store = Shared()
        meet(store, ["a", "b"], late=0)
        with pytest.raises(RuntimeError, match=rf"not all of 2 workers came within 0.3 s \(this is rank {rank}\)"):
            find_each_other(store, rank, 2, "a", 0.3)
