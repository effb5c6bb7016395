"""The machine that the suite runs on, in words."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

import torch

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI for a CPU)

# isort: split
import colossalai

__all__ = ["describe"]


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
