"""A script that torchrun starts, and starts again: ``restarted_script.py FOLDER STEPS``.

It trains what the members of :mod:`tests.support.elastic_jobs` train, and writes into the folder, by process, what it
has done. A file ``kill.NODE`` there says after which step a worker of a node ends itself, and where; one does so, once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)

# isort: split
from colossal_hetero import ElasticConfig
from tests.support.elastic_jobs import Kill, cluster, train


class Told:
    """Writes what happens into a file of this process."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._name = folder, f"{node}.{os.getpid()}"

    def put(self, message: tuple[Any, ...]) -> None:
        """Write a message of the script."""
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


def main(folder: Path, steps: int) -> None:
    """Train to the end, or until a member is lost."""
    torch.set_num_threads(1)
    node = os.environ["COLOSSAL_HETERO_NODE"]
    elastic = ElasticConfig(recovery="restart", memory=folder / "memory", timeout_seconds=20)
    topology = cluster(["big-0", "small-0"], [1, 2])
    train(steps, planned_end(folder, node), None, (), Told(folder, node), elastic, topology)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
