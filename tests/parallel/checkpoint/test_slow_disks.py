"""Ranks whose disks are unlike save at every step of a quick loop: the last checkpoint is always made, on all ranks.

So it is at the end of scripts with several plugins, which end without an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint.places import Place, find_checkpoints
from colossal_hetero.checkpoint.storage import FileOperations
from tests.support import three_plugins
from tests.support.checkpoint_runs import boosted, different_tensors, gathered, hybrid, train
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH

STEPS = 200 if IS_THOROUGH else 20


def train_with_slow_disk(folder: Path, seconds: float) -> None:
    """As in docs/checkpoints.md, with each rank in turn slow, and with local and shared folders and shared ones alone.
    Training is one step now and then, so that the others are quick."""
    rank, create, slow = dist.get_rank(), FileOperations.create, -1

    def create_slowly(files: FileOperations, path: Path) -> int:
        if rank == slow:
            time.sleep(seconds)
        return create(files, path)

    with patch.object(FileOperations, "create", create_slowly):
        for slow in range(dist.get_world_size()):
            for local in (None, folder / f"local-{slow}-{rank}") if slow == 0 else (None,):
                case = f"rank {slow} is slow, {'shared only' if local is None else 'local and shared'}"
                shared = folder / f"shared-{slow}-{local is None}"
                run = boosted(
                    "vit", hybrid(checkpoints=CheckpointConfig(local=local, shared=shared, node=f"node-{rank}"))
                )
                start, results = run.plugin.resume(run.model, run.optimizer), []
                for step in range(start.step + 1, STEPS + 1):
                    if step % 50 == 0:
                        train(run, [step])
                    results.append(run.plugin.save(run.model, run.optimizer, step=step))
                run.plugin.wait_for_saves()
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, results)
                assert all(each == results for each in everyone), case
                for place in [shared, *([local] if local else [])]:
                    assert find_checkpoints([Place(place)]).checkpoints[0].step == STEPS, case
                resumed = boosted("vit", hybrid(checkpoints=CheckpointConfig(shared=shared)))
                assert resumed.plugin.resume(resumed.model, resumed.optimizer).step == STEPS, case
                assert different_tensors(gathered(resumed), gathered(run)) == [], case


@pytest.mark.parametrize("ranks", [2, 3] if IS_THOROUGH else [3])
def test_the_last_checkpoint_of_quick_steps_is_made(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, train_with_slow_disk, tmp_path, 0.003)


ROUNDS = 3 if IS_THOROUGH else 2
"""The disk of rank 0, of rank 1 and of no rank is slow; in the second round the scripts do not wait for their saves."""


def test_ranks_end_without_an_error_and_the_last_step_is_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.three_plugins", str(tmp_path), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    ends = re.findall(r"round \d+: exit codes (.*), newest steps (.*)", done.stdout)
    assert ends == [("[0, 0]", str([three_plugins.STEPS] * 3))] * ROUNDS, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0
