"""Probing on real ranks: the cluster file, the links between ranks, and ranks that are killed or never start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cluster.topology import MeasuredLink
from tests.support.forked_python import forked_output
from tests.support.harness import free_port, run_ranks
from tests.support.paths import REPOSITORY

COMMAND = [sys.executable, "-m", "colossal_hetero.cli.main", "probe"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_the_cluster_file_describes_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    shown = forked_output(
        "-m", "colossal_hetero.cli.main", "probe", "--nproc", 2, "--out", path, "--cluster-of", "*=here"
    )
    topology = load_cluster(path)
    assert topology.clusters == ("here",)
    assert [node.devices for node in topology.nodes] == [(0, 1)]
    assert all(device.kind.name.startswith("cpu") and 0 < device.speed <= 1 for device in topology.devices)
    assert 0 < topology.devices[0].kind.memory_bytes < 2 * psutil.virtual_memory().total
    assert topology.nodes[0].inside.kind == "local"
    assert path.read_text().count(" gloo: ") == 1
    assert "devices: 2, nodes: 1, clusters: 1" in " ".join(shown.split())


def measure_as_rank(rounds: list[list[tuple[int, int]]]) -> list[MeasuredLink]:
    from colossal_hetero.cli.probe_ranks import measure_links

    return measure_links(rounds, "gloo", torch.device("cpu"))


def test_every_rank_returns_all_links() -> None:
    rounds = [[(0, 1), (3, 2)], [(1, 3)]]
    results = run_ranks(4, measure_as_rank, rounds)
    assert all(result == results[0] for result in results)
    assert {(link.ranks, link.protocol) for link in results[0]} == {(pair, "gloo") for pair in [*rounds[0], *rounds[1]]}
    assert all(link.bytes_per_second > 0 and link.latency_seconds >= 0 for link in results[0])


def rank_processes(command: psutil.Process) -> list[psutil.Process]:
    """Wait until both ranks exist, and return their processes."""
    for _ in range(1200):
        ranks = [each for each in command.children() if "spawn_main" in " ".join(each.cmdline())]
        if len(ranks) == 2:
            return sorted(ranks, key=lambda each: each.pid)
        time.sleep(0.05)
    raise AssertionError("the ranks were not started")


def test_a_killed_rank_ends_the_command_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    with subprocess.Popen(
        [*COMMAND, "--nproc", "2", "--out", str(path)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        try:
            other, killed = rank_processes(psutil.Process(command.pid))
            os.kill(killed.pid, signal.SIGKILL)
            _, errors = command.communicate(timeout=60)
        finally:
            command.kill()
    assert command.returncode == 2
    assert errors.strip() == "Error: rank 1 was ended by signal 9; the other ranks were stopped"
    assert not other.is_running()
    assert not path.exists()


def test_a_rank_fails_if_another_rank_never_starts(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"}
    environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    answer = subprocess.run(
        [*COMMAND, "--timeout", "2", "--out", str(tmp_path / "cluster.toml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode != 0
    assert "Traceback" not in answer.stderr
    assert "rank 0" in answer.stderr
    assert not list(tmp_path.iterdir())
