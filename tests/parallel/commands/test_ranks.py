"""``colossal-hetero profile`` and ``probe`` on real ranks, also on ranks that are killed or never start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from colossal_hetero.cli.probe_ranks import measure_links
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.profile.layer_profile import load_profile
from tests.support.checks import of_all_ranks, on
from tests.support.forked_python import forked_output
from tests.support.harness import free_port
from tests.support.paths import REPOSITORY

VIT = ["timm:vit_tiny_patch16_224", "--set", "depth=3", "--set", "embed_dim=48", "--image-size", "32"]
GPT = ["hf:gpt2", "--set", "n_layer=2", "--set", "n_embd=48", "--set", "vocab_size=99", "--sequence", "16"]


def arguments(model: list[str], out: Path) -> list[str]:
    command = ["-m", "colossal_hetero.cli.main", "profile", "--model", *model]
    return [*command, "--micro-batch", "1,2", "--seconds", "0", "--nproc", "2", "--out", str(out)]


def test_ranks_measure_a_named_model(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    shown = forked_output(*arguments(VIT, out))
    written = load_profile(out)
    assert (written.blocks, written.name, written.source) == (3, VIT[0], "measured")
    assert len(written.rank_devices) == 2 and set(written.rank_devices) <= {"cpu", "cpu-2"}
    assert written.micro_batches("cpu", 1) == (1, 2)
    assert min(written.times[0].forward_seconds) > 0
    assert json.loads(out.read_text())["state_factor"] == 4.0
    assert f"{out}: layers of {VIT[0]}, measured" in shown.replace("\n", "")


def test_tensor_parallel_degrees_are_measured_in_one_profile(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    shown = forked_output(*arguments(GPT, out), "--tp", "1,2")
    written = load_profile(out)
    assert (written.blocks, written.name) == (2, GPT[0])
    alone, shared = written.sizes[0], written.sizes[-1]
    if len(set(written.rank_devices)) > 1:  # on a busy machine the two ranks may seem unequal
        assert "tensor parallel 2: groups of unequal devices are left out: ranks 0 to 1 are cpu and cpu-2" in shown
        return
    assert written.tensor_parallel_degrees("cpu") == (1, 2) and written.micro_batches("cpu", 2) == (1, 2)
    # qkv, the projection and the MLP are halved; biases of the row-parallel layers and the norms are not.
    width, four = 48, 4
    whole = four * (12 * width * width + 13 * width)
    assert alone.parameter_bytes[1] == whole
    assert shared.parameter_bytes[1] == four * (6 * width * width + (3 + 4) * width // 2 + 6 * width)
    assert shared.output_bytes == alone.output_bytes


def test_one_degree_alone(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    forked_output(*arguments(VIT[:3] + VIT[5:] + ["--set", "num_heads=2"], out), "--tp", "2")
    written = load_profile(out)
    assert written.tensor_parallel_degrees("cpu") == (2,) and written.rank_devices == ("cpu", "cpu")


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


@on(4)
def every_rank_returns_all_links() -> None:
    rounds = [[(0, 1), (3, 2)], [(1, 3)]]
    links, *others = of_all_ranks(measure_links(rounds, "gloo", torch.device("cpu")))
    assert others == [links] * 3
    assert {(link.ranks, link.protocol) for link in links} == {(pair, "gloo") for pair in [*rounds[0], *rounds[1]]}
    assert all(link.bytes_per_second > 0 and link.latency_seconds >= 0 for link in links)


def rank_processes(command: psutil.Process) -> list[psutil.Process]:
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
