"""Start the ranks on this machine, and end them together when one fails."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from rich.console import Console
from usage import UsageError

__all__ = ["DEFAULT_RANKS", "end_at_once_on_signals", "run_as_rank", "run_command", "start_ranks", "started_here"]

DEFAULT_RANKS = 2

RUN_ID = "colossal-hetero-example"
"""What ranks that this module started know their run as."""

LOST_PEER_SECONDS = 10.0
"""How long a rank that lost another one waits to be ended by the launcher, which then names the rank that failed."""


class LaunchOptions(Protocol):
    """What a command line says of the ranks."""

    @property
    def nproc(self) -> int | None:
        """How many to start."""
        ...


Chosen = TypeVar("Chosen", bound=LaunchOptions)


def run_command(
    parse: Callable[[], Chosen], check: Callable[[Chosen, int], None], run: Callable[[Chosen], None]
) -> int:
    """The ``main`` of an example: start ranks, or be one that a launcher has started.

    Args:
        parse: reads the command line.
        check: finds what cannot work with so many ranks, before any starts, and on each of them.
        run: what a rank does.

    Returns:
        The exit status: 2 if the command line asks for what cannot be done, which is said in one line.
    """
    launched = "RANK" in os.environ
    if launched:
        end_at_once_on_signals()
    errors = Console(stderr=True)
    try:
        options = parse()
        world_size = int(os.environ["WORLD_SIZE"]) if launched else options.nproc or DEFAULT_RANKS
        if launched and options.nproc not in (None, world_size):
            raise UsageError(
                f"--nproc {options.nproc} does not fit the {world_size} ranks that the launcher started; leave it out"
            )
        check(options, world_size)
        if not started_here():
            _check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            errors.print(f"train.py: error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    if launched:
        return run_as_rank(lambda: run(options), errors)
    return start_ranks(world_size, errors)


def _check_devices(local_ranks: int) -> None:
    import torch

    if torch.cuda.is_available() and local_ranks > torch.cuda.device_count():
        raise UsageError(
            f"{local_ranks} ranks need a GPU each and this machine has {torch.cuda.device_count()}; start fewer with "
            "--nproc, or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command"
        )


def start_ranks(ranks: int, console: Console) -> int:
    """Run this program on ``ranks`` processes of this machine and return its exit status.

    The ranks are those of ``torch.distributed.run --standalone``. When one of them fails the others are ended, and
    the last line says which one it was and why.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What the launcher logs about failures is said once, below.
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))
    try:
        with tempfile.TemporaryDirectory(prefix="example_") as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=ranks,
                run_id=RUN_ID,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            elastic_launch(config, sys.executable)(os.path.abspath(sys.argv[0]), *sys.argv[1:])
    except ChildFailedError as error:
        _restore(console)
        return _report_failure(error.failures, ranks, console)
    except (KeyboardInterrupt, SignalException) as error:
        _restore(console)
        number = getattr(error, "sigval", signal.SIGINT)
        console.print("Interrupted." if number == signal.SIGINT else "Ended from outside.", style="yellow")
        return 128 + int(number)
    return 0


def started_here() -> bool:
    """Whether this process is a rank that :func:`start_ranks` started."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID


def run_as_rank(function: Callable[[], None], console: Console) -> int:
    """Call ``function`` as one of the ranks and return the exit status of the process.

    A rank that fails shows its traceback; the last line is the launcher's if it is ours. One whose neighbor failed
    waits to be ended, so that the neighbor's reason is the one that is seen.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    rank = int(os.environ["RANK"])
    try:
        function()
    except UsageError as error:
        if rank == 0:
            console.print(f"train.py: error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except Exception as error:
        if _lost_peer(error):
            time.sleep(LOST_PEER_SECONDS)
            reason = f"rank {rank} lost the connection to another rank: {str(error).splitlines()[0]}"
        else:
            console.print(traceback.format_exc().rstrip(), style="dim", markup=False, highlight=False, soft_wrap=True)
            reason = f"rank {rank} failed: {_describe(error)}"
        get_error_handler().record_exception(error)
        if not started_here():
            console.print(f"train.py: {reason}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 1
    return 0


def end_at_once_on_signals() -> None:
    """From now on SIGINT and SIGTERM end this process, also while it waits for other ranks inside a collective.

    Python runs its own handlers only between two of its instructions, which a rank that waits in C++ does not reach. To
    be called before there are other threads, which inherit that they do not take these signals.
    """
    expected = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, expected)

    def wait_and_end() -> None:
        number = signal.sigwait(expected)
        if os.environ.get("RANK") == "0" and not started_here():
            _restore(Console(stderr=True))
        os._exit(128 + number)

    threading.Thread(target=wait_and_end, daemon=True).start()


def _restore(console: Console) -> None:
    """Show the cursor again, which a progress bar that was ended could not do."""
    if console.is_terminal:
        console.show_cursor(True)
        console.print()


def _report_failure(failures: Mapping[int, Any], ranks: int, console: Console) -> int:
    """Say which rank failed first and why; return the exit status."""
    statuses = {failure.exitcode for failure in failures.values()}
    if 2 in statuses:
        return 2  # rank 0 has said what is wrong with the options
    # A rank killed by the system explains the others' lost connections, whatever the order in which they were noticed.
    rank = min(failures, key=lambda rank: (failures[rank].exitcode > 0, failures[rank].timestamp))
    failure = failures[rank]
    if failure.exitcode < 0:
        reason = f"was ended by {failure.signal_name()}"
        if failure.exitcode == -signal.SIGKILL:
            reason += " from outside (the system does so when memory runs out)"
    else:
        message = failure.error_file_data.get("message", "")
        text = message.get("message", "") if isinstance(message, dict) else ""
        reason = f"failed: {text.splitlines()[0]}" if text else f"ended with status {failure.exitcode}"
    others = "; the other ranks were stopped" if ranks > 1 else ""
    console.print(
        f"train.py: rank {rank} {reason}{others}", style="bold red", markup=False, highlight=False, soft_wrap=True
    )
    return 1


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _lost_peer(error: BaseException) -> bool:
    """Whether the error says no more than that another rank is gone."""
    text = str(error)
    return "gloo" in text or "Connection closed by peer" in text or "NCCL communicator was aborted" in text


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
