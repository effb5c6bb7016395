"""Limit the address space, and compare the largest micro-batch that profiling finds with the true one.

Each row needs two processes with the same limit. One trains, as a usual loop does, with every size, 1, 2, 3, …, until
one runs out of memory; this gives the true size. The other profiles before the first iteration, as the plugin does, and
then trains iterations with the size that it found. The outputs of an iteration exist until those of the next one are
there, as the names of a loop keep them.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import print_table, read_options
from colossal_hetero.colossalai_support.accelerator import is_out_of_memory
from colossal_hetero.profiling.aborted_step import abort_step
from colossal_hetero.profiling.device_profiler import profile_device
from colossal_hetero.profiling.memory import recover
from colossal_hetero.profiling.optimizer_state import optimizer_state_bytes, step_temporary_bytes
from colossal_hetero.profiling.preserved_state import preserved_state
from colossal_hetero.profiling.progress import SEARCHING, Progress
from colossal_hetero.profiling.rank_profiler import smallest_batch
from colossal_hetero.profiling.training_step import TrialRun, default_training_step

# isort: split
from colossalai.interface import OptimizerWrapper

CPU = torch.device("cpu")
ITERATIONS = 3
ACCUMULATED = 2
"""Micro-batches per optimizer step, as in a global batch that is divided."""


@dataclass(frozen=True)
class Case:
    """A model with its samples."""

    make: Callable[[], nn.Module]
    sample: dict[str, torch.Tensor] | tuple[torch.Tensor, torch.Tensor]
    room: int
    """Free memory before the first pass, in MB."""


def language_model(name: str, **sizes: Any) -> nn.Module:
    import transformers

    kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertForMaskedLM"}.get(name)
    model = getattr(transformers, kind or f"{name}ForConditionalGeneration")
    return model(getattr(transformers, f"{name}Config")(**sizes))


def words(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(length, dtype=torch.long), "labels": torch.ones(length, dtype=torch.long)}


IMAGE = (torch.zeros(3, 32, 32), torch.tensor(0))
SMALL = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
GPT2 = dict(n_layer=2, n_embd=64, n_head=2, vocab_size=50_257)
T5 = dict(d_model=64, d_kv=32, d_ff=128, num_layers=2, num_heads=2, vocab_size=32_128, decoder_start_token_id=0)
VIT = dict(embed_dim=192, depth=4, num_heads=3, patch_size=4, img_size=32, num_classes=10, global_pool="avg")


def convolutions() -> nn.Module:
    layers = [(nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16)) for inputs in (3, 16, 16, 16)]
    head = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    return nn.Sequential(*(each for pair in layers for each in pair), *head)


CASES = {
    "GPT-2": Case(partial(language_model, "GPT2", **GPT2), words(16), 300),
    "Llama": Case(partial(language_model, "Llama", **SMALL, vocab_size=32_000), words(32), 300),
    "BERT": Case(partial(language_model, "Bert", **SMALL, vocab_size=30_522), words(32), 300),
    "T5": Case(partial(language_model, "T5", **T5), words(24), 300),
    "ViT": Case(partial(VisionTransformer, **VIT), IMAGE, 60),
    "convolutions": Case(convolutions, IMAGE, 60),
    "MLP": Case(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10_000)),
        IMAGE,
        60,
    ),
}
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""With these settings, glibc returns freed memory to the system at once."""


class Repeated(Dataset):
    """A data set of equal samples."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        return self._sample


def train(trial: TrialRun, batch: int) -> None:
    """Train like a usual loop, whose names keep the outputs and the loss of an iteration during the next one.

    Gradients are accumulated, as those of the micro-batches of a global batch.
    """
    model, optimizer = trial.model, trial.optimizer
    for iteration in range(1, ITERATIONS + 1):
        inputs: Any = trial.batch(range(batch))
        if isinstance(inputs, dict):
            outputs = model(**inputs)
            loss = outputs.loss
        else:
            outputs = model(inputs[0])
            loss = F.cross_entropy(outputs, inputs[1])
        optimizer.backward(loss)
        if iteration % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()


def every_size(trial: TrialRun) -> int:
    train(trial, 2)
    for batch in range(2, sys.maxsize):
        try:
            train(trial, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
            return batch - 1
    raise AssertionError("no limit")


def profile(trial: TrialRun) -> dict[str, Any]:
    searched: list[int] = []

    def count(progress: Progress) -> None:
        if progress.action == SEARCHING:
            searched.append(progress.samples)

    model, optimizer = trial.model, trial.optimizer
    trial.step_bytes = step_temporary_bytes(optimizer)
    start = time.perf_counter()
    with preserved_state(model, optimizer):
        abort = partial(abort_step, model, optimizer)
        found = profile_device(
            trial,
            1 << 16,
            state_bytes_to_come=optimizer_state_bytes(optimizer),
            device=CPU,
            smallest=smallest_batch(trial, 1 << 16, abort),
            on_progress=count,
            abort=abort,
        ).max_batch
    trial.release()
    seconds = time.perf_counter() - start
    trains = "yes"
    try:
        train(trial, max(found, 1))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        trains = "no"
    # The first pass with the smallest size is a warm-up; it is also reported as a trial, but not counted.
    return {"found": found, "trials": max(len(searched) - 1, 1), "seconds": seconds, "trains": trains}


def alone(name: str, way: str) -> None:
    """Print what ``way`` finds if this process, which must be a new one, may map so much more memory than now.

    oneDNN keeps megabytes for each size, so it is off: the result depends little on sizes that ran before.
    """
    torch.manual_seed(1)
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    case = CASES[name]
    model = case.make().train()
    optimizer = OptimizerWrapper(torch.optim.AdamW(model.parameters()))
    loader = DataLoader(Repeated(case.sample))
    trial = TrialRun(model, optimizer, F.cross_entropy, default_training_step, loader)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + case.room * 1_000_000, hard))
    print(json.dumps({"every size": every_size, "profile": profile}[way](trial)))


def in_process(name: str, way: str) -> Any:
    """Call :func:`alone` in a new process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **RETURNED}
    command = [sys.executable, "-m", __spec__.name, "--alone", name, way]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        return alone(*sys.argv[2:])
    rows = []
    for name in read_options(__doc__, models=tuple(CASES)).models:
        true, found = in_process(name, "every size"), in_process(name, "profile")
        cells = (found["found"], f"{found['found'] / true:.2f}", found["trials"], f"{2 * math.log2(true) + 4:.1f}")
        rows.append((name, CASES[name].room, true, *cells, found["seconds"], found["trains"]))
    columns = ("model", "free memory [MB]", "true", "found", "found / true", "trials", "bound", "profiling [s]")
    print_table(
        "The largest micro-batch in a limited address space",
        (*columns, "then trains"),
        rows,
        [
            "Gradients, optimizer state, activations and what libraries map at their first use need this memory.",
            "The loop keeps its outputs. Aim: it trains with the size that was found, at least 0.9 of the true one.",
            "The bound of the number of trials is 2·log2(true) + 4.",
            "glibc returns freed memory, and oneDNN, which keeps megabytes for each size, is not used.",
        ],
    )


if __name__ == "__main__":
    main()
