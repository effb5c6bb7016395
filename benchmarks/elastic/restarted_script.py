"""A script that torchrun starts again after a process was killed; it continues from a layer checkpoint of each step.

``torchrun --nproc-per-node 3 --max-restarts 1 benchmarks/elastic/restarted_script.py FOLDER STEPS KILL_AT``. It trains
what the members of :mod:`tests.support.elastic_jobs` train. Rank 1 ends itself with SIGKILL after step ``KILL_AT``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (lets Colossal-AI work on a CPU, without its warnings)
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2, loss_of
from tests.support.elastic_jobs import GLOBAL_BATCH, NODES, Texts, cluster, profile

# isort: split
import colossalai
import torch.distributed as dist
from colossalai.booster import Booster

from colossal_hetero import CheckpointConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.elastic.held_layers import surviving_topology


def main(folder: Path, steps: int, kill_at: int) -> None:
    colossalai.launch_from_torch(verbose=False)
    nodes = NODES[: dist.get_world_size()]
    planning = PlanConfig(
        cluster=surviving_topology(cluster(), nodes),
        profile=profile(),
        global_batch_size=GLOBAL_BATCH,
        min_replicas=2,
        layer_sums=True,
    )
    plugin = HeteroHybridParallelPlugin(
        plan="auto", planning=planning, checkpoints=CheckpointConfig(shared=folder), precision="fp32", max_norm=1.0
    )
    model = gpt2().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = plugin.prepare_dataloader(Texts())
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    start = plugin.resume(model, optimizer, None, loader)
    step = start.step
    batches = loader.rest_of_epoch()
    while step < steps:
        booster.execute_pipeline(next(batches), model, loss_of, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        plugin.save(model, optimizer, None, loader, step=step)
        plugin.wait_for_saves()
        if dist.get_rank() == 0:
            print(f"step {step} {time.time()}", flush=True)
        if step == kill_at and dist.get_rank() == 1 and start.step == 0:
            print(f"killed {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
