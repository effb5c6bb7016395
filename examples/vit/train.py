"""Train a vision transformer with tensor parallelism on devices that are not equally fast.

    python examples/vit/train.py --balance resize --straggler 1:4

starts two ranks on this machine, makes the second four times slower, and balances the work between them. ``--help``
lists the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "common"))

from launch import run_command, started_here
from options import Options, check_options, parse_options


def main() -> int:
    """Run the command line and return the exit status: 2 if it asks for what cannot be done."""
    return run_command(parse_options, check, run)


def check(options: Options, world_size: int) -> None:
    """Find what cannot work before any rank starts."""
    layout = check_options(options, world_size)
    if started_here():
        return
    from data import find_data
    from model import check_model

    find_data(options, options.batch_size)
    check_model(options, layout)


def run(options: Options) -> None:
    """Train, as one of the ranks."""
    from training import run

    run(options)


if __name__ == "__main__":
    sys.exit(main())
