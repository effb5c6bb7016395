"""What a worker of torchrun reads from its environment."""

from __future__ import annotations

import os
import socket

import pytest

from colossal_hetero.elastic.environment import TorchrunPlace, launcher_name, runs_launcher

ENVIRONMENT = dict(
    RANK="0",
    WORLD_SIZE="3",
    LOCAL_RANK="0",
    LOCAL_WORLD_SIZE="1",
    MASTER_ADDR="10.0.0.5",
    MASTER_PORT="29400",
    TORCHELASTIC_RUN_ID="vit-7",
    TORCHELASTIC_USE_AGENT_STORE="True",
    COLOSSAL_HETERO_NODE="gpu-3",
)


def test_places() -> None:
    place = TorchrunPlace.from_environ(ENVIRONMENT)
    assert place == TorchrunPlace(0, 3, 0, "10.0.0.5", 29400, False, "gpu-3", "vit-7")
    place = TorchrunPlace.from_environ(
        ENVIRONMENT | dict(TORCHELASTIC_USE_AGENT_STORE="False", COLOSSAL_HETERO_NODE="")
    )
    assert place.hosts_store and place.node == socket.gethostname()
    place = TorchrunPlace.from_environ(ENVIRONMENT | dict(TORCHELASTIC_USE_AGENT_STORE="False", RANK="1"))
    assert not place.hosts_store


@pytest.mark.parametrize("changes", [dict(TORCHELASTIC_RUN_ID="none"), dict(TORCHELASTIC_RUN_ID="")])
def test_a_job_without_a_name_has_that_of_its_launcher(changes: dict[str, str]) -> None:
    job = TorchrunPlace.from_environ(ENVIRONMENT | changes).job
    assert job == launcher_name(os.getppid()) and runs_launcher(job)
    number, start = job.split("-")[1:]
    assert not runs_launcher(f"launcher-{number}-{int(start) + 1}")
    assert runs_launcher("a-job-with-a-name")


def test_a_process_of_nobody_is_told_how_to_start() -> None:
    with pytest.raises(ValueError, match=r"RANK, MASTER_PORT is not set, .*torchrun --max-restarts"):
        TorchrunPlace.from_environ({k: v for k, v in ENVIRONMENT.items() if k not in ("RANK", "MASTER_PORT")})
