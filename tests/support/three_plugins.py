"""Processes that each make three plugins with checkpoints and end as scripts do, again and again.

    python -m tests.support.three_plugins FOLDER ROUNDS

Two ranks are forked from a process that has loaded everything and has no threads; then each ends with its interpreter.
Prints how each of them ended.
"""

from __future__ import annotations

import os
import signal
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

STEPS = 5


def main(folder: Path, waits: bool, slow: int) -> None:
    """The script. With ``slow``, a rank whose disk is slow; unless it ``waits``, the last saves are made at its end."""
    torch.set_num_threads(1)
    colossalai.launch_from_torch()
    rank, create = dist.get_rank(), FileOperations.create
    if rank == slow:
        FileOperations.create = lambda files, path: (time.sleep(0.02), create(files, path))[1]  # type: ignore
    for number in range(3):
        local, shared = folder / f"local-{number}-{rank}", folder / f"shared-{number}"
        config = CheckpointConfig(local=local, shared=shared, node=f"node-{rank}")
        run = boosted("vit", hybrid(tp_size=2, checkpoints=config))
        run.plugin.resume(run.model, run.optimizer)
        train(run, [1])
        for step in range(1, STEPS + 1):
            run.plugin.save(run.model, run.optimizer, step=step)
        if waits:
            run.plugin.wait_for_saves()


def run_round(folder: Path, waits: bool, slow: int) -> list[int]:
    """How two ranks end: exit codes, or signals below 0."""
    port, children = str(free_port()), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            main(folder, waits, slow)
            sys.exit(0)
        children.append(child)
    deadline, codes = time.monotonic() + 60, dict.fromkeys(children, -signal.SIGKILL)
    left = set(children)
    while left and time.monotonic() < deadline:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                left.remove(child)
        time.sleep(0.05)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return list(codes.values())


if __name__ == "__main__":
    for number in range(int(sys.argv[2])):
        root = Path(sys.argv[1]) / str(number)
        ended = run_round(root, waits=number % 2 == 1, slow=(1, 2, 0)[number % 3])
        newest = [max(int(path.name[5:]) for path in root.glob(f"shared-{each}/step-*")) for each in range(3)]
        print(f"round {number}: exit codes {ended}, newest steps {newest}", flush=True)
