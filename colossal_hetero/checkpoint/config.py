"""Settings of layer checkpoints, and the error that names what is wrong with one."""

from dataclasses import dataclass
from pathlib import Path

from ..common.methods import with_checked_names


@with_checked_names
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Folders, frequency and number of layer checkpoints. At least one folder is required."""

    local: str | Path | None = None
    """A folder on a disk of each node, for the layers that the node holds. Fast, but lost with the node."""
    shared: str | Path | None = None
    """A folder that all nodes reach, for all layers."""
    keep: int = 3
    """Number of checkpoints that each folder keeps; the oldest are removed."""
    save_every: int = 1
    """``plugin.save`` saves only if the number of the step is a multiple of it."""
    node: str | None = None
    """Name of this rank's node, the same on all its ranks; None: the name of the host."""

    def __post_init__(self) -> None:
        if self.local is None and self.shared is None:
            raise ValueError("CheckpointConfig needs a folder: local=, on a disk of each node, shared=, or both")
        for name in ("keep", "save_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        if self.node is not None and (not self.node or set(self.node) & set("/\\ ")):
            raise ValueError(f"node={self.node!r} is used in names of files; it must be a word without slashes")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message says which, why, and what can be done."""
