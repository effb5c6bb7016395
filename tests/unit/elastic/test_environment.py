"""What a worker of torchrun reads from its environment, with and without the store of a job."""

from __future__ import annotations

import os
import re
import socket

import pytest

from colossal_hetero.elastic.environment import (
    ElasticEnvironment,
    TorchrunPlace,
    launcher_name,
    parse_address,
    runs_launcher,
)

TORCHRUN = dict(
    RANK="0",
    WORLD_SIZE="3",
    LOCAL_RANK="1",
    LOCAL_WORLD_SIZE="2",
    GROUP_WORLD_SIZE="1",
    MASTER_ADDR="10.0.0.6",
    MASTER_PORT="29500",
    TORCHELASTIC_RUN_ID="vit-7",
    TORCHELASTIC_USE_AGENT_STORE="True",
)
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


def test_addresses() -> None:
    assert parse_address("store.example:29400") == ("store.example", 29400)
    place = ElasticEnvironment.from_environ(JOB | dict(COLOSSAL_HETERO_STORE="[fe80::1%eth0]:1"))
    assert (place.store_host, place.store_port) == ("fe80::1%eth0", 1)
    for wrong in ("host", "host:", ":1", "::1:29400", "host:port", "host:0", "host:65536", "a b:1", "host:1\n"):
        with pytest.raises(ValueError, match="valid"):
            parse_address(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"COLOSSAL_HETERO_STORE": None}, "COLOSSAL_HETERO_STORE.*is not set.*colossal-hetero store.*torchrun"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set.*not a worker of torchrun.*torchrun --standalone"),
        ({"GROUP_WORLD_SIZE": "2"}, "has 2 nodes, and ends the workers of all.*alone.*recovery='restart'"),
        ({"COLOSSAL_HETERO_STORE": "host"}, "COLOSSAL_HETERO_STORE: 'host' does not have the form HOST:PORT"),
        ({"COLOSSAL_HETERO_NODE": "a/b"}, "'a/b' cannot be the name of a node"),
        ({"COLOSSAL_HETERO_JOB": ""}, "'' cannot be the name of a job"),
    ],
)
def test_wrong_environments_are_refused_in_words(changes: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in {**JOB, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        ElasticEnvironment.from_environ(environ)


def test_the_place_in_the_world_of_torchrun() -> None:
    environ = TORCHRUN | dict(COLOSSAL_HETERO_NODE="gpu-3")
    assert TorchrunPlace.from_environ(environ) == TorchrunPlace(0, 3, 1, "10.0.0.6", 29500, False, "gpu-3", "vit-7")
    environ = TORCHRUN | dict(TORCHELASTIC_USE_AGENT_STORE="False", COLOSSAL_HETERO_NODE="")
    place = TorchrunPlace.from_environ(environ)
    assert place.hosts_store and place.node == socket.gethostname()
    assert not TorchrunPlace.from_environ(environ | dict(RANK="1")).hosts_store


@pytest.mark.parametrize("name", ["none", ""])
def test_a_job_without_a_name_has_that_of_its_launcher(name: str) -> None:
    job = TorchrunPlace.from_environ(TORCHRUN | dict(TORCHELASTIC_RUN_ID=name)).job
    assert job == launcher_name(os.getppid()) and runs_launcher(job)
    number, start = job.split("-")[1:]
    assert not runs_launcher(f"launcher-{number}-{int(start) + 1}")
    assert runs_launcher("a-job-with-a-name")


def test_a_process_of_nobody_is_told_how_to_start() -> None:
    with pytest.raises(ValueError, match=r"RANK, MASTER_PORT is not set, .*torchrun --max-restarts"):
        TorchrunPlace.from_environ({k: v for k, v in TORCHRUN.items() if k not in ("RANK", "MASTER_PORT")})
