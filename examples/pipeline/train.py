"""Train in a pipeline on devices that are not equally fast: with equal stages, and with stages that fit.

    python examples/pipeline/train.py

starts two ranks on this machine, makes the second four times slower, trains both ways, and compares. ``--help`` lists
the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))

from launch import run_command, started_here
from settings import Settings, check_settings, parse_settings


def main() -> int:
    """Run the command line and return the exit status: 2 if it asks for what cannot be done."""
    return run_command(parse_settings, check, run)


def check(settings: Settings, world_size: int) -> None:
    """Find what cannot work before any rank starts."""
    check_settings(settings, world_size)
    if not started_here():
        from data import find_data

        find_data(settings, settings.global_batch, "--global-batch")


def run(settings: Settings) -> None:
    """Train, as one of the ranks."""
    from pipelines import run

    run(settings)


if __name__ == "__main__":
    sys.exit(main())
