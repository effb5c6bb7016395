"""Limit the address space, and compare the largest micro-batch that profiling finds with the true one.

Each row needs two processes with the same limit. One trains an iteration and then tries every size, 1, 2, 3, …, until
one runs out of memory; this gives the true size. The other profiles before the first iteration, as the plugin does, and
then trains three iterations with the size that it found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from benchmarks.common import print_table
from colossal_hetero.profiling.aborted_step import abort_step
from colossal_hetero.profiling.batches.device_profiler import (
    BatchProgress,
    Timing,
    optimizer_state_bytes,
    profile_device,
)
from colossal_hetero.profiling.memory import is_out_of_memory, recover
from colossal_hetero.profiling.preserved_state import preserved_state

CPU = torch.device("cpu")
MODELS = {
    "ViT": partial(
        VisionTransformer,
        embed_dim=192,
        depth=4,
        num_heads=3,
        patch_size=4,
        img_size=32,
        num_classes=10,
        global_pool="avg",
    ),
    "convolutions": lambda: nn.Sequential(
        *(layer for i in range(4) for layer in (nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16))),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ),
}
EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""With these settings, glibc returns freed memory to the system at once."""


def step(model: nn.Module, batch: int) -> Timing:
    start = time.perf_counter()
    loss = F.cross_entropy(model(torch.zeros(batch, 3, 32, 32)), torch.zeros(batch, dtype=torch.long))
    forward = time.perf_counter() - start
    loss.backward()
    return Timing(time.perf_counter() - start, forward)


def every_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    step(model, 1)
    optimizer.step()
    for batch in range(1, sys.maxsize):
        try:
            step(model, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
            return batch - 1
    raise AssertionError("no limit")


def profile(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    searched: list[int] = []

    def count(progress: BatchProgress) -> None:
        if progress.action == "searching":
            searched.append(progress.batch)

    start = time.perf_counter()
    with preserved_state(model, optimizer):
        found = profile_device(
            partial(step, model),
            1 << 16,
            state_bytes_to_come=optimizer_state_bytes(optimizer),
            device=CPU,
            on_progress=count,
            abort=partial(abort_step, model, optimizer),
        ).max_batch
    seconds = time.perf_counter() - start
    trains = "yes"
    try:
        for _ in range(3):
            optimizer.zero_grad()
            step(model, max(found, 1))
            optimizer.step()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        trains = "no"
    # The first pass with one sample is a warm-up; it is also reported as a trial, but not counted.
    return {"found": found, "trials": max(len(searched) - 1, 1), "seconds": seconds, "trains": trains}


def alone(model_name: str, room: int, way: str) -> None:
    """Print what ``way`` finds if this process, which must be a new one, may map ``room`` bytes more than now."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    if way.endswith("exactly"):
        torch.backends.mkldnn.set_flags(False)
    model = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters())
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, hard))
    answer = every_size(model, optimizer) if way.startswith("every size") else profile(model, optimizer)
    print(json.dumps(answer))


def in_process(caches: str, name: str, room: str, way: str) -> Any:
    """Call :func:`alone` in a new process. With caches ``off`` the result depends little on sizes that ran before."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(EXACT if caches == "off" else {})}
    command = [sys.executable, "-m", __spec__.name, "--alone", name, room, f"{way} exactly" if caches == "off" else way]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rooms",
        type=float,
        nargs="+",
        default=[40, 65, 100, 150, 210],
        help="free memory before the first pass, in MB",
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--caches", choices=["off", "default"], default="off", help="caches of glibc and oneDNN")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.alone:
        name, room, way = arguments.alone
        return alone(name, int(room), way)
    rows = []
    for name in arguments.models:
        for room in arguments.rooms:
            bytes_ = str(int(room * 1e6))
            true = in_process(arguments.caches, name, bytes_, "every size")
            found = in_process(arguments.caches, name, bytes_, "profile")
            bound = f"{2 * math.log2(true) + 4:.1f}" if true else "1"
            cells = (found["found"], found["trials"], bound, found["seconds"], found["trains"])
            rows.append((name, f"{room:g}", true, *cells))
    print_table(
        f"The largest micro-batch in a limited address space, caches {arguments.caches}",
        ("model", "free memory [MB]", "true", "found", "trials", "bound", "profiling [s]", "then trains"),
        rows,
        [
            "Gradients, optimizer state, activations and what libraries map at their first use need this memory.",
            "The bound of the number of trials is 2·log2(true) + 4.",
            "caches off: glibc returns freed memory, and oneDNN, which keeps megabytes for each size, is not used.",
        ],
    )


if __name__ == "__main__":
    main()
