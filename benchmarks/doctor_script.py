"""An ordinary training script, with a fault on request: what ``benchmarks/doctor.py`` and the tests watch.

It knows nothing of the doctor, unless ``--alternate`` asks what watching costs. The model is a perceptron on random
data, seeded, so that losses can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WAYS = ("ddp", "fsdp", "colossalai")
FAULTS = ("none", "compute", "quota", "loader", "error")


class Samples(Dataset):
    """Random samples, each of which takes ``seconds`` to load."""

    def __init__(self, count: int, width: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.inputs = torch.randn(64, width, generator=generator)
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index % 64], index % 10


class Model(nn.Module):
    def __init__(self, width: int, busy: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(width, 10)
        self.busy = busy

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        start = time.thread_time()
        outputs = self.head(self.layers(inputs))
        end = time.thread_time() + self.busy * (time.thread_time() - start)
        while time.thread_time() < end:
            pass
        return outputs


def wrapped(way: str, model: nn.Module, optimizer_of: Any) -> tuple[nn.Module, Any, Any]:
    """The model, its optimizer, and a function that runs a backward pass."""
    if way == "colossalai":
        import colossal_hetero.accelerator  # noqa: F401

        # isort: split
        from colossalai.booster import Booster
        from colossalai.booster.plugin import TorchDDPPlugin

        booster = Booster(plugin=TorchDDPPlugin())
        model, optimizer, *_ = booster.boost(model, optimizer_of(model.parameters()))
        return model, optimizer, booster.backward
    if way == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        device = torch.device("cpu")
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id=device)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    return model, optimizer_of(model.parameters()), lambda loss, _: loss.backward()


class Switch:
    """Turns watching on and off within a run, so that both have the same memory, cores and neighbors."""

    def __init__(self) -> None:
        from colossal_hetero import doctor

        names = [name for name in doctor.COLLECTIVES if hasattr(dist, name)]
        plain = {name: getattr(dist, name) for name in names}
        doctor.watch(after=1e9)
        self.recorder = doctor._watched[0]
        self.functions = {True: {name: getattr(dist, name) for name in names}, False: plain}

    def __call__(self, on: bool) -> None:
        for name, function in self.functions[on].items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)
        self.recorder.is_off = not on
        if not on:
            self.recorder._measure_forward(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=WAYS, default="ddp")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--slow", type=int, default=1, help="rank that has the fault")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--alternate", type=int, help="watch in every second stretch of so many iterations")
    parser.add_argument("--out", type=Path, help="folder for the losses and seconds of each rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fault = options.fault if rank == options.slow else "none"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= dist.get_world_size():
        os.sched_setaffinity(0, {cores[rank]})

    model = Model(options.width, busy=8.0 if fault == "compute" else 0.0)
    model, optimizer, backward = wrapped(options.way, model, lambda p: torch.optim.SGD(p, lr=1e-2))
    seconds = 0.001 if fault == "loader" else 0.0
    data = Samples(options.iterations * options.batch, options.width, seconds)
    quota: Any = contextlib.nullcontext()
    if fault == "quota":
        from colossal_hetero.testing import cpu_quota

        quota = cpu_quota(0.25)
    losses, ends, cpu = [], [], []
    switch = Switch() if options.alternate else None
    with quota:
        for number, (inputs, labels) in enumerate(DataLoader(data, batch_size=options.batch)):
            if switch and number % options.alternate == 0:
                switch(number // options.alternate % 2 == 1)
            loss = F.cross_entropy(model(inputs), labels)
            backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            ends.append(time.perf_counter())
            cpu.append(time.process_time())
            if fault == "error" and number == options.iterations // 2:
                raise ValueError("the script fails on purpose")
    if options.out is not None:
        record = {
            "losses": losses,
            "ends": ends,
            "cpu": cpu,
            "draw": torch.rand(1).item(),
            "argv": sys.argv,
            "path": sys.path[0],
        }
        (options.out / f"{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
