"""Train as a member of an elastic job: other members may die, leave and join meanwhile.

    colossal-hetero store --port 29400  # on a machine that stays; then on each node:
    export COLOSSAL_HETERO_STORE=HOST:29400 COLOSSAL_HETERO_NODE=node-0
    torchrun --standalone --max-restarts 3 examples/elastic/train.py --cluster cluster.toml --profile profile.json

``make elastic`` does all of it on this machine (``demo.py``). Nothing in this file treats a change of the members: the
plugin does, inside ``execute_pipeline`` and ``optimizer.step``.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

import torch
import torch.distributed as dist

import colossal_hetero.accelerator  # noqa: F401  (before colossalai: lets it work on a CPU, and quietly)

# isort: split
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster

from colossal_hetero import CheckpointConfig, ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from examples.common.images import load_data, whole_batch
from examples.common.learning_rate import warm_up_and_decay
from examples.elastic.loop_trace import LoopTrace
from examples.elastic.model import DTYPES, loss_of, make_model
from examples.elastic.options import ElasticOptions, parse_options


def main(options: ElasticOptions) -> None:
    """Join the job, train to the end, and leave it."""
    node = os.environ["COLOSSAL_HETERO_NODE"]
    images, _ = load_data(options, lambda items, what: iter(items))
    plugin = HeteroHybridParallelPlugin(
        plan="auto",
        planning=PlanConfig(
            cluster=options.cluster,
            profile=options.profile,
            global_batch_size=options.global_batch,
            min_replicas=2,  # every layer is on two nodes, so that one of them may be lost
        ),
        elastic=ElasticConfig(),
        checkpoints=checkpoints(options, node, len(images)),
        precision="fp32",  # the model's own precision
    )
    model = make_model(options, int(images.labels.max()) + 1)
    loader = plugin.prepare_dataloader(images, shuffle=True, seed=options.seed, drop_last=True, collate_fn=whole_batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    total = loader.global_batches * options.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_decay, total=total))
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, loss_of, loader, schedule)
    # A process that joins a running job gets parameters, moments, schedule and position from the other members here.
    start = plugin.resume(model, optimizer, schedule, loader)
    trace = LoopTrace(options.trace, node, plugin, start)
    step = start.step
    for epoch in range(start.epoch, options.epochs):
        loader.set_epoch(epoch)
        images.set_epoch(epoch)
        for batches in loader.rest_of_epoch():
            batches = map(functools.partial(on_device, options), batches)
            result = booster.execute_pipeline(batches, model, loss_of, optimizer, return_loss=True)
            trace.passes_done(step + 1, result["loss"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            trace.step_done(step)
            plugin.save(model, optimizer, schedule, loader, step=step, epoch=epoch)
        if dist.get_rank() == 0:  # whichever process that is now
            print(f"epoch {epoch + 1}/{options.epochs}: {step} steps, {dist.get_world_size()} members", flush=True)
    plugin.wait_for_saves()
    trace.finished()


def checkpoints(options: ElasticOptions, node: str, images: int) -> CheckpointConfig | None:
    """A checkpoint after each epoch, for the case that no member is left that holds some layer."""
    if options.checkpoints is None:
        return None
    return CheckpointConfig(shared=options.checkpoints, node=node, save_every=images // options.global_batch)


def on_device(options: ElasticOptions, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels where the model is, the images in its precision."""
    device = get_accelerator().get_current_device()
    return batch[0].to(device, DTYPES[options.precision]), batch[1].to(device)


if __name__ == "__main__":
    main(parse_options())
