"""Read checkpoints without Colossal-AI."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a sharded checkpoint."""
    return {
        name: tensor
        for part in sorted(folder.glob("*.bin"))
        for name, tensor in torch.load(part, weights_only=True).items()
    }
