"""Ranks whose disks are unlike save at every step of a quick loop, in a script with several plugins that just ends."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support import three_plugins
from tests.support.random_examples import IS_THOROUGH

ROUNDS = 3 if IS_THOROUGH else 1
"""The disk of rank 1, of no rank and of rank 0 is slow. In the second round the scripts wait for their saves."""


def test_ranks_end_without_an_error_and_the_last_step_is_saved(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.three_plugins", str(tmp_path), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    ends = re.findall(r"round \d+: exit codes (.*), newest steps (.*)", done.stdout)
    assert ends == [("[0, 0]", str([three_plugins.STEPS] * 3))] * ROUNDS, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0
