"""Save and load checkpoints of runs, and read their weights without Colossal-AI."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.training import Trained


def save_checkpoint(run: Trained, folder: Path, sharded: bool) -> None:
    """All ranks save the model and the optimizer in ``folder``, which rank 0 makes."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    run.booster.save_model(run.model, str(folder / ("model" if sharded else "model.pt")), shard=sharded)
    run.booster.save_optimizer(run.optimizer, str(folder / ("optimizer" if sharded else "optimizer.pt")), shard=sharded)
    dist.barrier()


def load_checkpoint(run: Trained, folder: Path, sharded: bool) -> Trained:
    """Load what :func:`save_checkpoint` saved into the model and the optimizer of ``run``; returns ``run``."""
    run.booster.load_model(run.model, str(folder / ("model" if sharded else "model.pt")))
    run.booster.load_optimizer(run.optimizer, str(folder / ("optimizer" if sharded else "optimizer.pt")))
    return run


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a sharded checkpoint."""
    return {
        name: tensor
        for part in sorted(folder.glob("*.bin"))
        for name, tensor in torch.load(part, weights_only=True).items()
    }
