"""What ``colossal-hetero launch`` tells a worker through environment variables. Needs no torch.

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
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ElasticEnvironment", "format_address", "parse_address"]

STORE = "COLOSSAL_HETERO_STORE"
JOB = "COLOSSAL_HETERO_JOB"
NODE = "COLOSSAL_HETERO_NODE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"

_OTHER_START = "Start the script with `colossal-hetero launch --store HOST:PORT`, or use recovery='restart'"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``; an IPv6 address is written in brackets, as in ``[::1]:29400``.

    Raises:
        ValueError: the text has another form, or the port is not in 1 to 65535.
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]]+)):([0-9]+)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} does not have the form HOST:PORT; valid is, for example, 10.0.0.5:29400")
    port = int(match[3])
    if not 1 <= port <= 65535:
        raise ValueError(f"{text!r}: port {port} does not exist; valid are 1 to 65535")
    return match[1] or match[2], port


def format_address(host: str, port: int) -> str:
    """``HOST:PORT``, as :func:`parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class ElasticEnvironment:
    """Where a worker of an elastic job is, and where its store is.

    Raises:
        ValueError: a value is not possible; the message says which would be.
    """

    store_host: str
    store_port: int
    """1 to 65535."""
    job: str
    """Letters, digits, ``.``, ``_`` and ``-``."""
    node: str
    """As ``job``."""
    local_rank: int
    """From 0 to ``local_world_size`` - 1."""
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
        """Read the variables in the table above from ``environ``, by default those of this process.

        Raises:
            ValueError: the process was started by torchrun, by something else that sets ``MASTER_ADDR``, or alone; or
                a variable is missing or has a value that is not possible.
        """
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
        """The variables from which :meth:`from_environ` reads the same values."""
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
