"""Scripts with several plugins that save in the background end without an error, and have their last checkpoints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.random_examples import IS_THOROUGH
from tests.support.three_plugins import STEPS

ROUNDS = 3 if IS_THOROUGH else 2
"""The disk of rank 0, of rank 1 and of no rank is slow; in the second round the scripts do not wait for their saves."""


def test_ranks_end_without_an_error_and_the_last_step_is_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.three_plugins", str(tmp_path), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    ends = re.findall(r"round \d+: exit codes (.*), newest steps (.*)", done.stdout)
    assert ends == [("[0, 0]", str([STEPS] * 3))] * ROUNDS, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0
