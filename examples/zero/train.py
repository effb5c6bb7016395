"""Train with ZeRO on devices that are not equally fast, with equal batches and with batches that fit each device.

    python examples/zero/train.py

starts two ranks on this machine, makes the second four times slower, trains both ways, and compares. ``--help`` lists
the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))

from choices import Choices, check_choices, parse_choices
from launch import run_command, started_here


def main() -> int:
    """Run the command line and return the exit status: 2 if it asks for what cannot be done."""
    return run_command(parse_choices, check, run)


def check(choices: Choices, world_size: int) -> None:
    """Find what cannot work before any rank starts."""
    check_choices(choices, world_size)
    if not started_here():
        from data import find_data

        find_data(choices, choices.global_batch, "--global-batch")


def run(choices: Choices) -> None:
    """Train, as one of the ranks."""
    from comparison import run

    run(choices)


if __name__ == "__main__":
    sys.exit(main())
