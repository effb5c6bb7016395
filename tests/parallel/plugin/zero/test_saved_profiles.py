"""Profiles of earlier runs: files that the user named, and the folder of profiles."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_hetero.data_parallel import attach
from colossal_hetero.profiling import rank_profiler
from colossal_hetero.profiling.rank_profiler import SpeedNow, changes
from tests.parallel.plugin.zero.test_trials import DROP_LAST, Normalized
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


def kinds_in(path: str) -> list[dict[str, Any]]:
    torch.distributed.barrier()
    return json.loads(Path(path).read_text())["kinds"]


def change_kinds(path: str, **changes: Any) -> None:
    """Rank 0 changes what the profile at ``path`` says of each kind: functions of its number, by name."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        content = json.loads(Path(path).read_text())
        for number, kind in enumerate(content["kinds"]):
            kind.update({key: change(number) for key, change in changes.items()})
        Path(path).write_text(json.dumps(content))
    torch.distributed.barrier()


def raise_the_global_batch(path: str) -> None:
    with patch.object(attach, "profile_ranks", Counted()) as measured:
        for samples, times, largest in ((4, 1, 4), (4, 1, 4), (8, 2, 8), (6, 2, 8)):
            plugin = boosted(1, samples=samples, profile=path).plugin
            assert measured.times == times, samples
            assert [kind["searched_batch"] for kind in kinds_in(path)] == [largest] * 2
            assert sum(share.samples for share in plugin.allocation.shares) == samples
        with pytest.raises(ValueError, match="made at stage 1, not 2"):
            boosted(2, samples=6, profile=path)
        # A user may edit the profile. Here it then says that rank 1 is much slower, so rank 1 gets fewer samples.
        change_kinds(path, points=lambda rank: [dict(batch=size, seconds=size * (1 + 4 * rank)) for size in (1, 4, 8)])
        fast, slow = boosted(1, samples=6, profile=path).plugin.allocation.shares
        assert (fast.samples, slow.samples) == (5, 1)
        # A limit that a user has set is kept, and so is one that no search has set.
        for change in ({"max_batch": 3}, {"searched_batch": None}):
            change_kinds(path, **{key: lambda _, value=value: value for key, value in change.items()})
            plugin = boosted(1, samples=20, profile=path).plugin
            assert measured.times == 2 and max(share.micro_batch for share in plugin.allocation.shares) <= 8


def test_a_profile_of_a_smaller_global_batch_is_made_again(tmp_path: Path) -> None:
    run_ranks(2, raise_the_global_batch, str(tmp_path / "profile.json"))


def refuse_paths(paths: list[str]) -> None:
    with patch.object(attach, "profile_ranks", Counted()) as measured:
        for path in paths:
            with pytest.raises(ValueError, match=f"profile='{path}' cannot be written"):
                boosted(1, profile=path)
        assert measured.times == 0


def test_a_path_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_ranks(2, refuse_paths, ["/proc/profile.json", f"{tmp_path}/file/profile.json", f"{tmp_path}/no/profile.json"])


def use_the_folder(folder: str) -> None:
    def files() -> int:
        torch.distributed.barrier()
        return len(list(Path(folder).glob("*"))) if Path(folder).exists() else 0

    with (
        patch.object(attach, "profile_ranks", Counted()) as measured,
        patch.object(rank_profiler, "MAX_CHANGE", 1e9),
        patch.object(rank_profiler, "MAX_DIFFERENCE", 1e9),
    ):
        for kind in (0, 1, 2, 3, "hybrid"):
            before = measured.times
            plugins = [boosted(kind, profile_cache=folder).plugin for _ in range(2)]
            assert measured.times == before + 1, kind
            first, second = (plugin.batch_balancer.allocation.shares for plugin in plugins)
            assert first == second, kind
        assert files() == 5
        # Another model, a larger global batch, another precision and another optimizer are measured by themselves.
        boosted(1, Normalized(), profile_cache=folder, loader=DROP_LAST)
        boosted(1, samples=9, profile_cache=folder)
        boosted(1, precision="bf16", profile_cache=folder)
        assert measured.times == files() == 8
        boosted(1, profile_cache="")
        assert measured.times == 9 and files() == 8
        # Damaged files count as missing.
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            for path in Path(folder).iterdir():
                path.write_text("{")
        torch.distributed.barrier()
        boosted(1, profile_cache=folder)
        assert measured.times == 10
        # One rank has become slower.
        slower = 10 ** (12 * torch.distributed.get_rank())
        with patch.object(rank_profiler, "_seconds", lambda trial, batch: 1e-3 * slower):
            boosted(1, profile_cache=folder)
        assert measured.times == 11
        # One rank has less memory than its largest micro-batch needs.
        for each in list(Path(folder).iterdir()):
            if each.read_text() != "{":
                change_kinds(str(each), sample_bytes=lambda rank: 2**60 * rank)
        boosted(1, profile_cache=folder)
        assert measured.times == 12


def test_profiles_are_kept_in_a_folder(tmp_path: Path) -> None:
    run_ranks(2, use_the_folder, str(tmp_path / "made" / "on demand"))
    shutil.rmtree(tmp_path / "made")


def test_the_check_of_an_earlier_profile() -> None:
    from tests.unit.planner.batches.test_batch_profile import device

    points = [{"batch": batch, "seconds": 0.03 * batch} for batch in (1, 2, 4, 8)]
    assert rank_profiler.size_to_check(device(points=points, max_batch=8)) == 2
    assert rank_profiler.size_to_check(device(points=points[2:], max_batch=8)) == 4

    def now(*factors: float) -> list[Any]:
        return [SpeedNow(2, 0.1 * factor, 0.1) for factor in factors]

    apart, together = (0, 1), (0, 0)
    for factors in ((1.0, 1.05), (1.2, 1.2), (0.85, 0.9)):
        assert changes(now(*factors), apart) is None
    for factors in ((1.3, 1.3), (0.7, 0.7)):
        assert changes(now(*factors), apart) is not None
    assert "rank 1: a micro-batch of 2 takes 0.122 s, but took 0.1 s" in (changes(now(1.0, 1.22), apart) or "")
    assert changes(now(0.5, 1.0), together) is None  # the other rank of the replica is the slow one
    assert changes([*now(1.0), "no memory"], apart) == "rank 1: no memory"
