"""What a user sees when a script imports this package."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import REPOSITORY

LATER = """
import colossal_hetero.layers, logging, sys, warnings
import colossalai.shardformer.policies.mixtral
print('imported', file=sys.stderr)
warnings.warn('Please install apex from source, says a user')
logging.getLogger('bitsandbytes.backends.cpu.ops').warning('Failed to load CPU gemm_4bit_forward again')
"""


def test_the_imports_of_the_readme_print_nothing_and_later_warnings_are_shown() -> None:
    """Those of its first Python example; ``tests/unit/test_docs.py`` checks the order of the others."""
    example = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    imports = "\n".join(line for line in example.splitlines() if line.startswith(("from ", "import ")))
    assert "Booster" in imports and "HeteroHybridParallelPlugin" in imports
    done = subprocess.run([sys.executable, "-c", imports + LATER], capture_output=True, text=True, check=True)
    before, after = done.stderr.split("imported\n")
    assert done.stdout + before == ""
    assert "UserWarning: Please install apex from source, says a user" in after
    assert "Failed to load CPU gemm_4bit_forward again" in after
