"""What a user sees when a script imports this package."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.paths import REPOSITORY


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU accelerator is for hosts without a GPU")
def test_the_import_prints_nothing_and_later_warnings_are_shown() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from colossalai.accelerator import get_accelerator\n"
            "stock = type(get_accelerator()).__name__\n"
            "import colossal_hetero.layers, logging, sys, warnings\n"
            "from colossalai.booster.plugin import HybridParallelPlugin\n"
            "import colossalai.shardformer.policies.mixtral\n"
            "print('imported', file=sys.stderr)\n"
            "warnings.warn('Please install apex from source, says a user')\n"
            "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU gemm_4bit_forward again')\n"
            "print(stock, type(get_accelerator()).__name__)\n",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "CpuAccelerator HeteroCpuAccelerator\n"
    before, after = done.stderr.split("imported\n")
    assert before == ""
    assert "UserWarning: Please install apex from source, says a user" in after
    assert "Failed to load CPU gemm_4bit_forward again" in after


def test_the_imports_of_the_readme_print_nothing() -> None:
    """Those of its first Python example; ``tests/unit/test_docs.py`` checks the order of the others."""
    example = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    imports = "\n".join(line for line in example.splitlines() if line.startswith(("from ", "import ")))
    assert "Booster" in imports and "HeteroHybridParallelPlugin" in imports
    done = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
