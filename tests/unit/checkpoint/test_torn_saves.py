"""A process that ends at any operation of a save leaves a whole checkpoint: the new one or the one before."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.harness import run_alone
from tests.support.torn_saves import check_killed, operations_of_a_save

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A folder in memory, where nothing waits for a disk."""


def kill_at_operations(start: int, stride: int) -> tuple[int, list[str]]:
    """Kill at every ``stride``-th operation from ``start``; returns the number of operations, and what was found."""
    found = []
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        (Path(folder) / "count").mkdir()
        operations = operations_of_a_save(Path(folder) / "count")
        for operation in range(start, operations + 1, stride):
            root = Path(folder) / (f"{operation} again" if operation // stride % 2 else str(operation))
            root.mkdir()
            found.append(check_killed(root, operation=operation))
    return operations, found


def test_a_save_that_is_killed_leaves_a_whole_checkpoint() -> None:
    # All operations are in benchmarks/checkpoint/torn_writes.py.
    operations, found = run_alone(kill_at_operations, start=3, stride=7)
    assert operations > 80
    assert {"20 killed", "30 killed"} <= set(found)
