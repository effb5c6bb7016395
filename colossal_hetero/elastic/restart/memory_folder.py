"""The folder with the memory files of a job on a node."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from .newest_memory import StateName
from .torchrun_place import runs_launcher

__all__ = ["FileName", "MemoryFolder", "default_memory"]

SUFFIX = "state"


def default_memory() -> Path:
    """Where memory files are, unless the user says otherwise: in the machine's memory, separate for each user."""
    return Path("/dev/shm") / f"colossal_hetero-{os.getuid()}"


class FileName(NamedTuple):
    """What the name of a file says."""

    state: StateName
    slot: int
    """Number of the worker on its node that wrote it."""

    def __str__(self) -> str:
        return f"{self.state.world}.{self.state.version:08d}.{self.slot}.{SUFFIX}"


class MemoryFolder:
    """Files of one job on one node. Files of other jobs are never looked at.

    Args:
        root: folder of all jobs on this machine.
        job: name of the job.
        node: name of the node: a machine may have several.
    """

    def __init__(self, root: Path | str, job: str, node: str) -> None:
        self._root = Path(root)
        self.path = self._root / quote(job, safe="") / quote(node, safe="")

    def prepare(self) -> None:
        """Make the folder, and remove those of jobs whose launcher, after which they are named, has ended.

        Raises:
            ValueError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ValueError(
                f"memory={str(self._root)!r}: {error.strerror}; give a folder in memory that can be written, such as "
                "/dev/shm/NAME, in ElasticConfig(memory=...)"
            ) from None
        for folder in self._root.iterdir():
            if not runs_launcher(folder.name):
                shutil.rmtree(folder, ignore_errors=True)

    def files(self) -> list[FileName]:
        """All complete files, sorted."""
        found = []
        with suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                world, *rest = entry.name.split(".")
                if world and len(rest) == 3 and rest[2] == SUFFIX:
                    found.append(FileName(StateName(int(rest[0]), world), int(rest[1])))
        return sorted(found)

    def file(self, name: FileName) -> Path:
        """Path of a file."""
        return self.path / str(name)

    def remove(self, name: FileName) -> None:
        """Remove a file, if it is there."""
        self.file(name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove all files of the job on this node, and folders that are empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # other nodes on the same machine, or other jobs
            self.path.parent.rmdir()
            self._root.rmdir()
