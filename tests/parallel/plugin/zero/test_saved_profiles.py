"""Profile files, which keep what was measured for later runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.data_parallel import attach
from tests.support.harness import run_ranks
from tests.support.zero_runs import boosted


class Counted:
    """Counts how often ranks are measured."""

    def __init__(self) -> None:
        self.times = 0
        self._measure = attach.profile_ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.times += 1
        return self._measure(*args, **kwargs)


@contextmanager
def told() -> Iterator[list[str]]:
    """What the block tells the user."""
    words: list[str] = []
    with patch.object(attach, "print_on_rank_0", words.append):
        yield words


def change_kinds(path: str, **changes: Any) -> None:
    """Rank 0 changes what the profile at ``path`` says of each kind: functions of its number, by name."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        content = json.loads(Path(path).read_text())
        for number, kind in enumerate(content["kinds"]):
            kind.update({key: change(number) for key, change in changes.items()})
        Path(path).write_text(json.dumps(content))
    torch.distributed.barrier()


def use_a_file(path: str) -> None:
    with patch.object(attach, "profile_ranks", Counted()) as measured:
        for kind in (0, 1, 2, 3, "hybrid"):
            before = measured.times
            file = f"{path}-{kind}.json"
            plugins = [boosted(kind, samples=8, profile=file).plugin for _ in range(2)]
            assert measured.times == before + 1, kind
            first, second = (plugin.batch_balancer.allocation.shares for plugin in plugins)
            assert first == second and sum(share.samples for share in first) == 8, kind
            torch.distributed.barrier()
        file, times = f"{path}-1.json", measured.times
        with pytest.raises(ValueError, match="made at stage 1, not 2"):
            boosted(2, samples=6, profile=file)
        elsewhere = file if torch.distributed.get_rank() == 0 else f"{path}-none.json"
        with pytest.raises(ValueError, match=r"does not exist on ranks \[1\]; copy it to their machines"):
            boosted(1, samples=8, profile=elsewhere)
        # A user may edit the profile. Here it then says that rank 1 is much slower, so rank 1 gets fewer samples.
        change_kinds(file, points=lambda rank: [dict(batch=size, seconds=size * (1 + 4 * rank)) for size in (1, 4, 8)])
        fast, slow = boosted(1, samples=6, profile=file).plugin.allocation.shares
        assert (fast.samples, slow.samples) == (5, 1)
        # It keeps its limits, whoever has set them.
        change_kinds(file, max_batch=lambda _: 3)
        with told() as words:
            plugin = boosted(1, samples=20, profile=file).plugin
        assert measured.times == times and max(share.micro_batch for share in plugin.allocation.shares) <= 3
        limit = "limits micro-batches to 3 samples, though memory does not; remove the file to measure again"
        assert sum(limit in each for each in words) == 1


def test_a_profile_file_is_used_again_and_may_be_edited(tmp_path: Path) -> None:
    run_ranks(2, use_a_file, str(tmp_path / "profile"))


def refuse_paths(paths: list[str]) -> None:
    with patch.object(attach, "profile_ranks", Counted()) as measured:
        for path in paths:
            with pytest.raises(ValueError, match=f"profile='{path}' cannot be written"):
                boosted(1, profile=path)
        assert measured.times == 0


def test_a_path_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_ranks(2, refuse_paths, ["/proc/profile.json", f"{tmp_path}/file/profile.json", f"{tmp_path}/no/profile.json"])
