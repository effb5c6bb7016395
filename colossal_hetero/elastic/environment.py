"""Environment variables through which ``colossal-hetero launch`` tells a worker its place. Without torch.

| variable | meaning |
| --- | --- |
| ``COLOSSAL_HETERO_STORE`` | ``HOST:PORT`` of the store |
| ``COLOSSAL_HETERO_JOB`` | name of the job; jobs with different names can share a store |
| ``COLOSSAL_HETERO_NODE`` | name of the node, unique in the job |
| ``LOCAL_RANK`` | number of the worker on its node, from 0 |
| ``LOCAL_WORLD_SIZE`` | number of workers on the node |
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ElasticEnvironment", "TorchrunPlace", "format_address", "launcher_name", "parse_address", "runs_launcher"]

STORE = "COLOSSAL_HETERO_STORE"
JOB = "COLOSSAL_HETERO_JOB"
NODE = "COLOSSAL_HETERO_NODE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"

_OTHER_START = "Start the script with `colossal-hetero launch --store HOST:PORT`, or use recovery='restart'"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address is written in brackets, as in ``[::1]:29400``."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]]+)):([0-9]+)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} does not have the form HOST:PORT; valid is, for example, 10.0.0.5:29400")
    port = int(match[3])
    if not 1 <= port <= 65535:
        raise ValueError(f"{text!r}: port {port} does not exist; valid are 1 to 65535")
    return match[1] or match[2], port


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ElasticEnvironment:
    """Place of a worker of an elastic job, and address of its store. See the table above."""

    store_host: str
    store_port: int
    job: str
    node: str
    local_rank: int
    local_world_size: int

    def __post_init__(self) -> None:
        for what, name in (("job", self.job), ("node", self.node)):
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ValueError(
                    f"{name!r} cannot be the name of a {what}: valid are letters, digits, '.', '_' and '-'"
                )
        if not 1 <= self.store_port <= 65535:
            raise ValueError(f"port {self.store_port} of the store does not exist; valid are 1 to 65535")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(
                f"local rank {self.local_rank} is not possible with {self.local_world_size} workers on the node; valid "
                f"are 0 to {LOCAL_WORLD_SIZE} - 1, and at least one worker"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> ElasticEnvironment:
        """Read the variables in the table above from ``environ``, by default those of this process."""
        environ = os.environ if environ is None else environ
        if "TORCHELASTIC_RUN_ID" in environ:
            raise ValueError(
                "this process was started by torchrun (TORCHELASTIC_RUN_ID is set), which ends all workers of a node "
                f"when one ends, so they cannot go on in the same processes. {_OTHER_START}"
            )
        if STORE not in environ:
            found = "only MASTER_ADDR is set, which names one fixed world" if "MASTER_ADDR" in environ else "not set"
            raise ValueError(f"{STORE}, the address of the store, is missing ({found}). {_OTHER_START}")
        missing = [name for name in (JOB, NODE, LOCAL_RANK, LOCAL_WORLD_SIZE) if name not in environ]
        if missing:
            raise ValueError(f"{STORE} is set, but {', '.join(missing)} is not. {_OTHER_START}, which sets all of them")
        try:
            host, port = parse_address(environ[STORE])
        except ValueError as error:
            raise ValueError(f"{STORE}: {error}") from None
        return cls(
            store_host=host,
            store_port=port,
            job=environ[JOB],
            node=environ[NODE],
            local_rank=_whole_number(environ, LOCAL_RANK),
            local_world_size=_whole_number(environ, LOCAL_WORLD_SIZE),
        )

    def variables(self) -> dict[str, str]:
        return {
            STORE: format_address(self.store_host, self.store_port),
            JOB: self.job,
            NODE: self.node,
            LOCAL_RANK: str(self.local_rank),
            LOCAL_WORLD_SIZE: str(self.local_world_size),
        }


def _whole_number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]+", environ[name]):
        raise ValueError(f"{name}={environ[name]!r} is not a whole number; valid are 0, 1, 2, …")
    return int(environ[name])


# Torchrun place ------------------------------------------------------------------------------------------------------
# torchrun ends all workers when one of them ends or a node comes or goes, and starts them again, maybe in another
# world. So a worker takes its world from its environment.


RUN_ID = "TORCHELASTIC_RUN_ID"
NO_RUN_ID = ("", "none")
"""Run ids of torchrun without ``--rdzv-id``."""
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_LAUNCHER = re.compile(r"launcher-(\d+)-(\d+)")


@dataclass(frozen=True)
class TorchrunPlace:
    rank: int
    world_size: int
    local_rank: int
    host: str
    """Host of the store through which the workers find each other."""
    port: int
    hosts_store: bool
    """True if this worker has to start that store, because no agent of torchrun has."""
    node: str
    """Name of the node: ``COLOSSAL_HETERO_NODE``, else the name of the host."""
    job: str
    """Name that only the restarted processes of this job share: ``--rdzv-id``, else the name of torchrun's process."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> TorchrunPlace:
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
    """True if the launcher after which a job was named may still run; true for jobs that have a name of their own."""
    match = _LAUNCHER.fullmatch(job)
    return match is None or _started(int(match[1])) == int(match[2])


def _started(process: int) -> int | None:
    """Start of a process in ticks since the start of the machine; None if it does not run."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
