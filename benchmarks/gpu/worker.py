"""Measure the cases of one part that have no result yet. The suite starts this in a process of its own."""

from __future__ import annotations

import gc
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI for a CPU)

# isort: split
import colossalai

from colossal_hetero.colossalai_support.accelerator import is_out_of_memory

from .part import Case, Machine, Part
from .store import CaseResult, PartResults, load_results


def measure_part(part: Part, machine: Machine, path: Path, seconds: float, *, again: bool, only: Sequence[str]) -> bool:
    """Measure cases until all have a result or the time is over; whether all have one.

    Args:
        part: the part.
        machine: where it runs.
        path: file of results. Cases that have a result there are left out.
        seconds: no case begins later than this.
        again: measure also what has a result.
        only: parts of the names of cases; others are left out. Empty: all cases.
    """
    begin = time.monotonic()
    environment = describe(machine.device)
    results = load_results(path, environment) or PartResults(environment=environment)
    chosen = [case for case in part.cases(machine) if not only or any(text in case.name for text in only)]
    missing = [case for case in chosen if again or case.name not in results.cases]
    for number, case in enumerate(missing):
        if time.monotonic() - begin > seconds:
            return False
        print(f"{part.name}: {case.name} ({number + 1} of {len(missing)})", file=sys.stderr, flush=True)
        results.start(case.name, path)
        results.finish(case.name, _result(case, machine), path)
    return True


def _result(case: Case, machine: Machine) -> CaseResult:
    if case.gpus > machine.gpus:
        return CaseResult(status="does not fit", message=f"needs {case.gpus} GPUs, and there are {machine.gpus}")
    free = machine.free_bytes
    if free is not None and case.memory_bytes > free:
        needs = f"needs {case.memory_bytes / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        return CaseResult(status="does not fit", message=needs)
    begin = time.monotonic()
    try:
        rows = [list(row) for row in case.measure()]
        result = CaseResult(status="done", rows=rows)
    except Exception as error:
        traceback.print_exc()
        status = "does not fit" if is_out_of_memory(error) else "failed"
        words = str(error).strip().splitlines() or [""]
        result = CaseResult(status=status, message=f"{type(error).__name__}: {words[0]}"[:300])
    finally:
        _release()
    return result.model_copy(update={"seconds": round(time.monotonic() - begin, 2)})


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, str]:
    """Device, driver and versions of the software, by name."""
    facts = {"device": "cpu", "cores": str(os.cpu_count())}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts["device"] = f"{torch.cuda.device_count()} × {found.name}, {found.total_memory / 2**30:.0f} GiB"
        facts["driver"] = _driver()
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        **facts,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "Colossal-AI": colossalai.__version__,
    }


def _driver() -> str:
    """The version of the GPU's driver, or "unknown"."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return lines[0] if lines else "unknown"
