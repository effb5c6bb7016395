"""Train with a limited address space, and profile before training if asked to."""

from __future__ import annotations

import ctypes
import random
import resource
import time
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

from colossal_hetero.profiling.aborted_step import abort_step
from colossal_hetero.profiling.device_profiler import profile_device
from colossal_hetero.profiling.memory import is_out_of_memory, recover, reserved_memory
from colossal_hetero.profiling.optimizer_state import optimizer_state_bytes
from colossal_hetero.profiling.preserved_state import preserved_state
from tests.support.snapshots import snapshot

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of glibc's ``mallopt``
DEVICE = torch.device("cpu")
ROOM, CAP = 50_200_000, 1000  # bytes that may be mapped beyond what is, and the largest batch of the search


class Net(nn.Module):
    """A model with half a megabyte of activations per sample, with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 512)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = nn.Dropout(0.1)
        self.last = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` is ``[batch, 64, 64]``, the result ``[batch, 10]``."""
        return self.last(self.dropout(torch.relu(self.norm(self.first(x)))).mean(1))


def step(model: nn.Module, batch: int) -> float:
    start = time.perf_counter()
    x, y = torch.randn(batch, 64, 64), torch.randint(0, 10, (batch,))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    random.random(), np.random.rand()
    return time.perf_counter() - start


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 64, 64), torch.randint(0, 10, (4,))
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def every_size(model: nn.Module) -> int:
    """The largest batch that fits, up to :data:`CAP`, found by trying 1, 2, 3, …"""
    largest = 0
    while largest < CAP:
        try:
            step(model, largest + 1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
            break
        largest += 1
    return largest


def map_large_tensors() -> None:
    """Map and unmap each tensor of 64 kB or more separately, so that the address space contains only tensors in use."""
    mallopt = ctypes.CDLL(None).mallopt
    assert mallopt(M_MMAP_THRESHOLD, 65536) and mallopt(M_TRIM_THRESHOLD, 65536) and mallopt(M_ARENA_MAX, 1)


def main(profiled: bool = True, trained_before: bool = True, to_come: int = 0) -> dict[str, Any]:
    map_large_tensors()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    result: dict[str, Any] = {}
    if trained_before:
        train(model, optimizer, 2)
        optimizer.zero_grad()
    result["before"] = snapshot(model, optimizer, ids=False)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + ROOM, hard))
    if profiled:
        with preserved_state(model, optimizer):
            sizes: list[int] = []
            profile = profile_device(
                lambda batch: (sizes.append(batch), step(model, batch))[1],
                CAP,
                state_bytes_to_come=to_come + optimizer_state_bytes(optimizer),
                device=DEVICE,
                abort=lambda: abort_step(model, optimizer),
            )
            result.update(profile=profile.model_dump(), sizes=sizes)
        reserve = resource.getrlimit(resource.RLIMIT_AS)[0] - profile.memory_bytes
        held = to_come + optimizer_state_bytes(optimizer) + reserve
        with preserved_state(model, optimizer), reserved_memory(held, DEVICE):
            step(model, 1)
            result["every_size"] = every_size(model)
    result["after"] = snapshot(model, optimizer, ids=False)
    result["losses"] = train(model, optimizer, 3)
    result["trained"] = snapshot(model, optimizer, ids=False)
    return result
