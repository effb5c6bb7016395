"""How many bytes really leave a rank in one synchronization of ZeRO, as the planner assumes."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import TensorDataset

from colossal_hetero.planner.batches.batch_profile import PASSES
from tests.support.harness import run_ranks
from tests.support.training import zero_plugin
from tests.support.zero_runs import unmeasured

WIDTH = 300
RANKS = 2
PARAMETERS = 3 * WIDTH * (WIDTH + 1)
TCP_INFO = struct.Struct("=B23xI92xQ16xI")
"""Of Linux's ``tcp_info``: state, packets without confirmation, bytes confirmed so far, bytes that wait to be sent."""
ESTABLISHED = 1
"""The state of a connection that is open at both ends."""


def sent_bytes() -> int:
    """Bytes that this process has sent over its TCP connections and that have arrived, headers of messages included."""
    return sum(arrived_bytes(int(number)) for number in os.listdir("/proc/self/fd"))


def arrived_bytes(descriptor: int) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return 0
            while True:
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
                state, unconfirmed, arrived, waiting = TCP_INFO.unpack(information)
                if state != ESTABLISHED or not (unconfirmed or waiting):
                    return arrived
                time.sleep(0.001)
    except OSError:  # closed meanwhile
        return 0


def passes_sent(stage: int, options: dict[str, Any]) -> tuple[float, float]:
    """How often the bytes of the model cross the network: in the passes of a batch, and in the optimizer's step."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    plugin = zero_plugin(stage, 2 * RANKS, max_micro_batch=2, **options)
    samples = TensorDataset(torch.randn(6 * RANKS, WIDTH), torch.arange(6 * RANKS))
    loader = plugin.prepare_dataloader(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, criterion, loader, _ = Booster(plugin=plugin).boost(
        model, optimizer, nn.CrossEntropyLoss(), loader
    )
    loader.divide_by(lambda samples: [[samples // RANKS]] * RANKS)
    counts = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        dist.barrier()
        counts = [sent_bytes()]
        optimizer.backward(criterion(model(inputs), targets))
        counts.append(sent_bytes())
        optimizer.step()
        counts.append(sent_bytes())
    message = PARAMETERS * 4 * (RANKS - 1) / RANKS
    return (counts[1] - counts[0]) / message, (counts[2] - counts[1]) / message


WRAPPED = dict(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
CASES: list[tuple[int, dict[str, Any], float, float]] = [
    (0, {}, PASSES[0], 0),
    (1, {}, PASSES[1], 1),
    (1, dict(overlap_communication=False), PASSES[1], 1),
    (2, {}, PASSES[2], 1),
    (3, WRAPPED, PASSES[3], 0),
    (3, {}, 2, 0),
]
"""Stage, options of the plugin, and how often the bytes cross the network in the passes and in the step."""


@unmeasured
def all_passes_sent() -> list[tuple[float, float]]:
    return [passes_sent(stage, options) for stage, options, *_ in CASES]


def test_synchronization_sends_as_much_as_the_planner_assumes() -> None:
    for found in run_ranks(RANKS, all_passes_sent):
        for (stage, options, *expected), sent in zip(CASES, found, strict=True):
            assert sent == pytest.approx(expected, rel=0.01, abs=0.01), (stage, options)
