"""A script that torchrun starts, and starts again: ``torchrun_script.py FOLDER STEPS``.

It trains what the members of :mod:`tests.support.elastic_jobs` train, and writes into the folder, by process, what it
has done. A file ``kill.NODE`` there says after which step a worker of a node ends itself, and where; one does so, once.
If there is a file ``wait``, it removes it, and waits until its torchrun has ended.
With a store of the job, processes recover, and wait for others after the steps that :func:`hold` says.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)

# isort: split
from colossal_hetero import ElasticConfig
from tests.support.elastic_jobs import Kill, cluster, train

WORKERS = 3
HELD, LAST_HELD = 6, 9


class Told:
    """Writes what happens into a file of this process."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._name = folder, f"{node}.{os.getpid()}"

    def put(self, message: tuple[Any, ...]) -> None:
        kind, *content = message
        if kind == "done":
            torch.save(content[0], self._folder / f"parameters.{self._name}")
        elif kind == "started":
            content = [content[0].step, content[0].received_bytes, content[0].read_bytes]
        with (self._folder / f"told.{self._name}").open("a") as file:
            file.write(json.dumps([kind, *content] if kind != "done" else [kind]) + "\n")


def planned_end(folder: Path, node: str) -> Kill | None:
    """Where this process ends itself: what the test says, but only in the first process that reads it."""
    try:
        (folder / f"kill.{node}").rename(folder / f"killed.{node}")
    except FileNotFoundError:
        return None
    return Kill(**json.loads((folder / f"killed.{node}").read_text()))


def hold(booster: Any, _: Any) -> None:
    """Let a worker join before each of the steps up to ``LAST_HELD``, and let one be lost then, if all are there."""
    run = booster.plugin._elastic
    if dist.get_rank() or not HELD <= run.version <= LAST_HELD:
        return
    if dist.get_world_size() < WORKERS:
        while not run._members.is_somebody_waiting():
            time.sleep(0.05)
    elif run.version == LAST_HELD:
        while not run.is_broken():
            time.sleep(0.05)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    if (folder / "wait").exists():
        parent = os.getppid()
        (folder / "wait").unlink()
        while os.getppid() == parent:
            time.sleep(0.05)
    node = os.environ["COLOSSAL_HETERO_NODE"]
    topology = cluster(["big-0", "small-0"], [1, 2])
    told, kill = Told(folder, node), planned_end(folder, node)
    if "COLOSSAL_HETERO_STORE" in os.environ:
        members = int(os.environ.get("MEMBERS", WORKERS))
        # On a busy machine, members need longer than the default limits.
        elastic = ElasticConfig(max_members=members, start_seconds=120, dead_seconds=5, last_call_seconds=3)
        more = {"after_step": hold} if members == WORKERS else {}
        train(steps, kill, None, (), told, elastic, topology, **more)
    else:
        elastic = ElasticConfig(recovery="restart", memory=folder / "memory", timeout_seconds=20)
        train(steps, kill, None, (), told, elastic, topology)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
