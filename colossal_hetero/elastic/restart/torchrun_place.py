"""Where a worker is that torchrun has started. Needs no torch.

torchrun ends all workers when one of them ends or when a node comes or goes, and starts them again, in a world that may
be another one. So a worker takes its world from its environment.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..environment import NODE

__all__ = ["TorchrunPlace", "launcher_name", "runs_launcher"]

RUN_ID = "TORCHELASTIC_RUN_ID"
NO_RUN_ID = ("", "none")
"""What torchrun sets without ``--rdzv-id``."""
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_LAUNCHER = re.compile(r"launcher-(\d+)-(\d+)")


@dataclass(frozen=True)
class TorchrunPlace:
    """What torchrun and the user tell a worker."""

    rank: int
    """As torchrun counts."""
    world_size: int
    local_rank: int
    host: str
    """Of the store through which the workers find each other."""
    port: int
    hosts_store: bool
    """Whether this worker has to start that store, because no agent of torchrun has."""
    node: str
    """Name of the node: that of the variable ``COLOSSAL_HETERO_NODE``, else that of the host."""
    job: str
    """The same for all processes that torchrun starts again on this node, and for those of no other job: torchrun's
    ``--rdzv-id``, else the name of its process."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> TorchrunPlace:
        """Read the environment, by default that of this process.

        Raises:
            ValueError: a variable is missing.
        """
        environ = os.environ if environ is None else environ
        missing = [name for name in REQUIRED if name not in environ]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} is not set, so this process is not a worker of torchrun. Start the script with "
                "`torchrun --max-restarts 100 ...`, or with `colossal-hetero launch --store HOST:PORT`"
            )
        rank = int(environ["RANK"])
        run = environ.get(RUN_ID, "")
        return cls(
            rank=rank,
            world_size=int(environ["WORLD_SIZE"]),
            local_rank=int(environ["LOCAL_RANK"]),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            hosts_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            node=environ.get(NODE) or socket.gethostname(),
            job=launcher_name(os.getppid()) if run in NO_RUN_ID else run,
        )


def launcher_name(process: int) -> str:
    """A name for the job of a launcher that gave it none; no other process ever has the same name on this machine."""
    return f"launcher-{process}-{_started(process)}"


def runs_launcher(job: str) -> bool:
    """Whether the launcher after which a job was named may still run; true for jobs that have a name of their own."""
    match = _LAUNCHER.fullmatch(job)
    return match is None or _started(int(match[1])) == int(match[2])


def _started(process: int) -> int | None:
    """When a process has started, in ticks since the start of the machine; None if it does not run."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
