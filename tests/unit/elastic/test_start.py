"""Before a world: what a worker reads from its environment, what is refused, and how workers find each other."""

from __future__ import annotations

import os
import socket

import pytest
from torch.distributed import HashStore

from colossal_hetero.elastic.environment import (
    ElasticEnvironment,
    TorchrunPlace,
    launcher_name,
    parse_address,
    runs_launcher,
)
from colossal_hetero.elastic.handshake import find_each_other

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


def test_a_worker_that_does_not_come_is_waited_for_up_to_the_limit() -> None:
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=rf"not all of 2 workers came within 0.3 s \(this is rank {rank}\)"):
            find_each_other(HashStore(), rank, 2, "a", 0.3)
