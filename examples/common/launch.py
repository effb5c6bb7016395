"""Start the ranks on this machine, and end them together when one fails."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rich.console import Console

from .options import DEFAULT_RANKS, Options, UsageError

RUN_ID = "colossal-hetero-example"
"""The run's name in the environment of ranks that this module started."""

LOST_PEER_SECONDS = 10.0
"""How long a rank that lost the connection to another one waits for the launcher, which names the rank that failed."""


Chosen = TypeVar("Chosen", bound=Options)


def run_command(module: str, parse: Callable[[], Chosen], check: Callable[[Chosen, int], Any]) -> int:
    """Run an example: start the ranks, or be one of them if a launcher has started this process.

    Each rank imports ``module`` and calls its ``main(options)``. Only then are torch and Colossal-AI loaded, so
    ``--help`` and errors in the command line come at once.

    Args:
        module: the name by which the example is imported, for example ``examples.vit.train``.
        parse: reads the command line.
        check: raises ``UsageError`` if something cannot work with that many ranks. It is called before ranks start.

    Returns:
        The exit status: 2 if the command line asks for something that cannot be done, which is said in one line.
    """
    launched = "RANK" in os.environ
    if launched:
        _end_at_once_on_signals()
    errors = Console(stderr=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = parse()
        for warning in caught:
            _print(errors, f"train.py: warning: {warning.message}", "yellow")
        world_size = int(os.environ["WORLD_SIZE"]) if launched else options.nproc or DEFAULT_RANKS
        if launched and options.nproc not in (None, world_size):
            raise UsageError(
                f"--nproc {options.nproc} does not fit the {world_size} ranks that the launcher started; leave it out"
            )
        if not started_here():
            check(options, world_size)
            _check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            _print(errors, f"train.py: error: {error}", "red")
        return 2
    except KeyboardInterrupt:
        return 130
    if launched:
        return _run_as_rank(lambda: importlib.import_module(module).main(options), errors)
    return _start_ranks(world_size, errors)


def _check_devices(local_ranks: int) -> None:
    import torch

    if torch.cuda.is_available() and local_ranks > torch.cuda.device_count():
        raise UsageError(
            f"{local_ranks} ranks need a GPU each and this machine has {torch.cuda.device_count()}; start fewer with "
            "--nproc, or train on the CPU with CUDA_VISIBLE_DEVICES= in front of the command"
        )


def _start_ranks(ranks: int, console: Console) -> int:
    """Run this program as ``ranks`` processes on this machine and return its exit status.

    Ranks are started as by ``torch.distributed.run --standalone``. When one of them fails, the others are ended, and
    the last line says which one failed and why.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher logs failures at length; _report_failure says them in one line.
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
    """Whether this process is a rank that :func:`run_command` started."""
    return os.environ.get("TORCHELASTIC_RUN_ID") == RUN_ID


def _run_as_rank(function: Callable[[], None], console: Console) -> int:
    """Call ``function`` as one of the ranks and return the exit status of the process.

    A rank that fails prints its traceback. If another rank failed, this one only loses its connection to it: it then
    waits to be ended, so that the other rank's reason is the one that is shown.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from colossal_hetero.common.ranks import is_lost_connection

    rank = int(os.environ["RANK"])
    try:
        function()
    except UsageError as error:
        if rank == 0:
            _print(console, f"train.py: error: {error}", "red")
        return 2
    except Exception as error:
        if is_lost_connection(str(error)):
            time.sleep(LOST_PEER_SECONDS)
            reason = f"rank {rank} lost the connection to another rank: {str(error).splitlines()[0]}"
        else:
            _print(console, traceback.format_exc().rstrip(), "dim")
            reason = f"rank {rank} failed: {type(error).__name__}: {error}"
        get_error_handler().record_exception(error)
        if not started_here():
            _print(console, f"train.py: {reason}", "bold red")
        return 1
    return 0


def _end_at_once_on_signals() -> None:
    """From now on SIGINT and SIGTERM end this process, also while it waits for other ranks inside a collective.

    Python runs its signal handlers only between two instructions of its own, which a rank that waits in C++ does not
    reach. Call this before other threads start (numpy and torch start some): they inherit the blocked signals.
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
    """Show the cursor again, which a progress bar hides and cannot restore when its process is ended."""
    if console.is_terminal:
        console.show_cursor(True)
        console.print()


def _report_failure(failures: Mapping[int, Any], ranks: int, console: Console) -> int:
    """Say which rank failed first and why; return the exit status."""
    statuses = {failure.exitcode for failure in failures.values()}
    if 2 in statuses:
        return 2  # rank 0 has printed what is wrong with the options
    # If the system killed a rank, that is the cause, even if another rank's lost connection was noticed first.
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
    _print(console, f"train.py: rank {rank} {reason}{others}", "bold red")
    return 1


def _print(console: Console, text: str, style: str) -> None:
    """Print ``text`` as it is, lines unbroken."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
