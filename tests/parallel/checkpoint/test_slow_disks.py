"""Ranks whose disks are unlike save at every step of a quick loop, in a script with several plugins that just ends.

The test runs this file as the script. Two ranks are forked from a process that has loaded everything and has no
threads; then each ends with its interpreter.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (before colossalai)

# isort: split
import colossalai
import torch
import torch.distributed as dist

from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint.storage import FileOperations
from tests.support.checkpoint_runs import boosted, hybrid, train
from tests.support.harness import free_port

STEPS, PLUGINS = 5, 2


def main(folder: Path) -> None:
    """The script. The disk of rank 1 is slow, and the last saves are made at the end."""
    torch.set_num_threads(1)
    colossalai.launch_from_torch()
    rank, create = dist.get_rank(), FileOperations.create
    if rank == 1:
        FileOperations.create = lambda files, path: (time.sleep(0.01), create(files, path))[1]  # type: ignore
    for number in range(PLUGINS):
        local, shared = folder / f"local-{number}-{rank}", folder / f"shared-{number}"
        config = CheckpointConfig(local=local, shared=shared, node=f"node-{rank}")
        run = boosted("vit", hybrid(tp_size=2, checkpoints=config))
        run.plugin.resume(run.model, run.optimizer)
        train(run, [1])
        for step in range(1, STEPS + 1):
            run.plugin.save(run.model, run.optimizer, step=step)


def test_ranks_end_without_an_error_and_the_last_step_is_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.returncode} ranks failed: {done.stderr}"
    for number in range(PLUGINS):
        assert max(path.name for path in tmp_path.glob(f"shared-{number}/step-*")) == f"step-{STEPS:08d}"


if __name__ == "__main__":
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    children = []
    for number in range(2):
        if (child := os.fork()) == 0:
            os.environ.update(RANK=str(number), LOCAL_RANK=str(number))
            main(Path(sys.argv[1]))
            sys.exit(0)
        children.append(child)
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
