"""Train a vision transformer with tensor parallelism on devices that are not equally fast.

    python examples/vit/train.py --balance resize --straggler 1:4

starts two ranks on this machine, makes the second four times slower, and balances the work between them. ``--help``
lists the flags. Under ``torchrun`` or ``colossalai run`` it joins the ranks that these have started.
"""

from __future__ import annotations

import os
import sys

from launch import end_at_once_on_signals, run_as_rank, start_ranks, started_here
from options import DEFAULT_RANKS, Options, UsageError, check_options, parse_options
from rich.console import Console


def main() -> int:
    """Run the command line and return the exit status: 2 if it asks for what cannot be done."""
    launched = "RANK" in os.environ
    if launched:
        end_at_once_on_signals()
    errors = Console(stderr=True)
    try:
        options = parse_options()
        world_size = int(os.environ["WORLD_SIZE"]) if launched else options.nproc or DEFAULT_RANKS
        check(options, world_size, launched)
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            errors.print(f"train.py: error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    if launched:
        from training import run

        return run_as_rank(lambda: run(options), errors)
    return start_ranks(world_size, errors)


def check(options: Options, world_size: int, launched: bool) -> None:
    """Find what cannot work before any rank starts."""
    if launched and options.nproc not in (None, world_size):
        raise UsageError(
            f"--nproc {options.nproc} does not fit the {world_size} ranks that the launcher started; leave it out"
        )
    layout = check_options(options, world_size)
    if started_here():
        return
    from data import find_data
    from model import check_model

    find_data(options)
    check_model(options, layout)
    _check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def _check_devices(local_ranks: int) -> None:
    import torch

    if torch.cuda.is_available() and local_ranks > torch.cuda.device_count():
        raise UsageError(
            f"{local_ranks} ranks need a GPU each and this machine has {torch.cuda.device_count()}; start fewer with "
            "--nproc, or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command"
        )


if __name__ == "__main__":
    sys.exit(main())
