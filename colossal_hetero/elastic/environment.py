"""Place of a worker in its job, without torch: variables of torchrun, SLURM and this package (docs/launching.md).

torchrun starts the workers of a node (``--nnodes 1``), and the variables of this package, which it passes on, name the
job that several nodes share.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

STORE = "COLOSSAL_HETERO_STORE"
JOB = "COLOSSAL_HETERO_JOB"
NODE = "COLOSSAL_HETERO_NODE"
SLURM_NODE = "SLURMD_NODENAME"

_START = (
    f"Run `colossal-hetero store` on a machine that stays, set {STORE} to the address that it prints, and start the "
    "script with `torchrun --standalone --nproc-per-node N --max-restarts 100` on each node"
)


def node_name(environ: Mapping[str, str]) -> str:
    return environ.get(NODE) or environ.get(SLURM_NODE) or socket.gethostname()


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
    """Place of a worker of an elastic job, and address of its store."""

    store_host: str
    store_port: int
    job: str
    node: str
    local_rank: int
    launcher: str  # name of the torchrun that has started this worker; the same after it has started its workers again

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> ElasticEnvironment:
        environ = os.environ if environ is None else environ
        if STORE not in environ:
            raise ValueError(f"{STORE}, the address of the store, is not set. {_START}")
        if "LOCAL_RANK" not in environ:
            raise ValueError(f"LOCAL_RANK is not set, so this process is not a worker of torchrun. {_START}")
        if (nodes := environ.get("GROUP_WORLD_SIZE", "1")) != "1":
            raise ValueError(
                f"one torchrun job has {nodes} nodes, and ends the workers of all of them when one ends, so they "
                f"cannot go on. {_START}, alone, without --nnodes, or use recovery='restart' without {STORE}"
            )
        try:
            host, port = parse_address(environ[STORE])
        except ValueError as error:
            raise ValueError(f"{STORE}: {error}") from None
        job, node = environ.get(JOB, "default"), node_name(environ)
        for what, name in (("job", job), ("node", node)):
            if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
                raise ValueError(
                    f"{name!r} cannot be the name of a {what}: valid are letters, digits, '.', '_' and '-'"
                )
        # torchrun's port, unlike its process, is the same for workers that a wrapper starts.
        launcher = f"torchrun on {socket.gethostname()} (MASTER_PORT {environ.get('MASTER_PORT', 'not set')})"
        return cls(host, port, job, node, int(environ["LOCAL_RANK"]), launcher)


def check_torchrun(environ: Mapping[str, str]) -> None:
    """End this process if its torchrun is gone: ``end_with_parent`` only notices a parent that ends later."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])), 5).close()
        except OSError as error:
            raise SystemExit(f"the torchrun of this process has ended before it joined its job: {error}") from None


RUN_ID = "TORCHELASTIC_RUN_ID"
NO_RUN_ID = ("", "none")  # run ids of torchrun without ``--rdzv-id``
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_LAUNCHER = re.compile(r"launcher-(\d+)-(\d+)")


@dataclass(frozen=True)
class TorchrunPlace:
    """Place of a worker in its world, from its environment: torchrun ends all workers when one of them ends or a node
    comes or goes, and starts them again, maybe in another world."""

    rank: int
    world_size: int
    local_rank: int
    host: str  # host of the store through which the workers find each other
    port: int
    hosts_store: bool  # True if this worker has to start that store, because no agent of torchrun has
    node: str  # name of the node, as in :class:`ElasticEnvironment`
    job: str
    """Name that only the restarted processes of this job share: ``--rdzv-id``, else the name of torchrun's process."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> TorchrunPlace:
        environ = os.environ if environ is None else environ
        missing = [name for name in REQUIRED if name not in environ]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} is not set, so this process is not a worker of torchrun. Start the script with "
                "`torchrun --max-restarts 100 ...`"
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
            node=node_name(environ),
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
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
