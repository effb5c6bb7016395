"""A process that is slow from outside: the kernel limits its CPU time (cgroups version 1 or 2)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["cpu_quota"]

CGROUPS = Path("/sys/fs/cgroup")
PREFIX = "colossal_hetero_"


@contextmanager
def cpu_quota(share: float, period_us: int = 100_000) -> Iterator[None]:
    """Limit all threads of this process together to ``share`` of one core, without changing the process itself.

    Args:
        share: above 0; 0.25 is a quarter of one core.
        period_us: the period of the limit in microseconds, 1,000 to 1,000,000. In each period the process runs until
            its share is used up, and then is stopped until the next period.

    Raises:
        OSError: the kernel has no CPU control groups, or this user may not create one.
    """
    root = CGROUPS / "cpu"
    quota_us = int(share * period_us)
    if root.is_dir():
        settings = {"cpu.cfs_period_us": str(period_us), "cpu.cfs_quota_us": str(quota_us)}
    else:
        root, settings = CGROUPS, {"cpu.max": f"{quota_us} {period_us}"}
    _remove_abandoned(root)
    group = root / f"{PREFIX}{os.getpid()}"
    group.mkdir()
    try:
        for file, value in settings.items():
            (group / file).write_text(value)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _remove_abandoned(root: Path) -> None:
    """Remove the groups of processes that were killed inside :func:`cpu_quota`."""
    for group in root.glob(f"{PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
            with suppress(OSError):
                group.rmdir()
