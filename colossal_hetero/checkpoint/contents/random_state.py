"""The random states of a rank: of Python, NumPy, torch, the device, and Colossal-AI's parallel dropout."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from colossalai.shardformer.layer.utils import Randomizer
from torch import nn

from ...accelerator import get_accelerator

__all__ = ["random_state_of", "restore_random_state", "share_random_state"]


def random_state_of(model: nn.Module) -> dict[str, Any]:
    """The random states of this rank, as tensors, tuples and numbers."""
    accelerator = get_accelerator()
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device_name": accelerator.name,
        "device": None if accelerator.name == "cpu" else accelerator.get_rng_state(),
        "randomizers": {place: dict(vars(each)) for place, each in _randomizers(model)},
    }


def restore_random_state(state: Mapping[str, Any], model: nn.Module) -> None:
    """Continue with the random states that this rank had, in a run with the same plan."""
    _restore_process(state)
    for place, randomizer in _randomizers(model):
        if place in state["randomizers"]:
            vars(randomizer).update(state["randomizers"][place])


def share_random_state(state: Mapping[str, Any], model: nn.Module, step: int) -> None:
    """Continue with the random states that one rank had, in a run with another plan. Every rank calls it.

    As after ``colossalai.launch``, the states of all processes are equal. Parallel dropout has another state on each
    rank and in each layer, and new ones are drawn here from its seeds and the step.
    """
    _restore_process(state)
    for _, randomizer in _randomizers(model):
        seed = randomizer.seed
        vars(randomizer).update(vars(Randomizer(seed + 1_000_003 * (step + 1))), seed=seed)


def _restore_process(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    accelerator = get_accelerator()
    if state["device"] is not None and state["device_name"] == accelerator.name:
        accelerator.set_rng_state(state["device"])


def _randomizers(model: nn.Module) -> Iterator[tuple[str, Randomizer]]:
    """Those of the modules, each with its name."""
    for module_name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Randomizer):
                yield f"{module_name}.{attribute}", value
