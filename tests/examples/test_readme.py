"""The first script of the README, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import REPOSITORY

MOST_LINES = 25


def first_script() -> tuple[str, list[str], str]:
    """The script, the command that starts it, and what the README says it prints."""
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = page[page.index("## First script") :]
    script, output = re.findall(r"^```\w*\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    command = re.search(r"`(torchrun [^`]*)`", section)
    assert command is not None
    return script, command[1].split(), output


def form(output: str) -> list[str]:
    """Lines in which numbers and the widths of columns do not count."""
    words = " ".join(output.split())
    return re.sub(r"─+", "─", re.sub(r"(?<![\w.])\d[\d.]*( (m|µ)?s\b|%)?", "#", words)).split()


def test_the_first_script_prints_what_the_readme_shows(tmp_path: Path) -> None:
    script, command, shown = first_script()
    assert len(script.splitlines()) <= MOST_LINES
    (tmp_path / "train.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    command = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    told = [line for line in result.stderr.splitlines() if line.startswith("colossal_hetero: rank 1 takes")]
    assert told and "of its work now runs on rank 0; iteration" in told[0], result.stderr
    # How long all of it takes, and so whether it pays, depends on what else the machine does.
    assert form(result.stdout)[:40] == form(shown.partition("\n")[2])[:40]
    assert "balancing saved" in shown and re.search(r"balancing\s+(saved|cost)", result.stdout)
