"""A job whose processes all end when one ends, and are started again: what torchrun does, with processes that are
forked from a server and so start faster."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from colossal_hetero import ElasticConfig
from colossal_hetero.planner.cluster.topology import Topology
from tests.support.elastic_jobs import Job, Kill, Outcome, Told, train

LIMIT_SECONDS = 120.0


def _worker(told: Told, environment: Mapping[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    train(*arguments[:3], (), told, *arguments[3:])


class RestartedJob(Job):
    """The worlds of a job, one after another; each is a call of :meth:`run_world`.

    Args:
        memory: folder of memory files.
        steps: optimizer steps of the job.
        disk: shared folder of layer checkpoints, of every third step.
        every: steps between two states in memory.
        name: of the job.
        topology: nodes that may take part.
    """

    def __init__(
        self,
        memory: Path,
        steps: int,
        disk: Path | None = None,
        every: int = 1,
        name: str = "job",
        topology: Topology | None = None,
    ) -> None:
        super().__init__(steps, folder=disk)
        elastic = ElasticConfig(recovery="restart", memory=memory, memory_every=every, timeout_seconds=20.0)
        self._name, self._more = name, (elastic, topology)

    def run_world(
        self, nodes: Sequence[str], kills: Mapping[int, Kill] | None = None, terminate: int | None = None
    ) -> Outcome:
        """A world, until all its processes have ended: when one of them fails, the others get SIGTERM.

        Args:
            nodes: of each process.
            kills: by number of the process: where it ends itself.
            terminate: all processes get SIGTERM after this step.
        """
        self.outcome, self.members = Outcome(), []
        for number in range(len(nodes)):
            self._start(nodes, number, (kills or {}).get(number))
        deadline, is_ending = time.monotonic() + LIMIT_SECONDS, False
        while self.alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the world did not end: {self.outcome}")
            message = self.message()
            reached = message is not None and message[1] == "step" and message[2][0] == terminate
            if not is_ending and (reached or any(member.exitcode for member in self.members)):
                is_ending = True
                for member in self.members:
                    member.terminate()
        return self.finish()

    def _start(self, nodes: Sequence[str], number: int, kill: Kill | None) -> None:
        environment = dict(
            RANK=str(number),
            WORLD_SIZE=str(len(nodes)),
            LOCAL_RANK=str(nodes[:number].count(nodes[number])),
            LOCAL_WORLD_SIZE=str(nodes.count(nodes[number])),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._server.port),
            TORCHELASTIC_RUN_ID=self._name,
            TORCHELASTIC_USE_AGENT_STORE="True",
            COLOSSAL_HETERO_NODE=nodes[number],
        )
        self._launch(_worker, environment, (self._steps, kill, self._folder, *self._more))
