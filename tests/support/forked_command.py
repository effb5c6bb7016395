"""Run a command that starts ranks, such as ``colossal-hetero probe``, without loading modules again in each rank.

A rank that such a command starts is a new Python process, which spends ten seconds of CPU time on imports. Here ranks
come from the fork server of :mod:`tests.support.harness`. They get the same arguments and the same environment.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import click
from click.testing import CliRunner

from colossal_hetero.common.launch import STARTED_HERE
from tests.support.harness import free_port, run_alone


def _run_rank(rank: int, count: int, port: int, module: str, arguments: list[str]) -> str:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), STARTED_HERE: "1"})
    os.environ.update(
        LOCAL_WORLD_SIZE=str(count), CUDA_VISIBLE_DEVICES="", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    command = getattr(importlib.import_module(module), module.rpartition(".")[2])
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


def run_with_forked_ranks(command: click.Command, arguments: Sequence[str]) -> str:
    """Run ``command`` in this process, and its ranks in forked processes. Returns what rank 0 printed."""
    shown: list[str] = []

    def start_ranks(count: int, module: str, arguments: Sequence[str]) -> None:
        port = free_port()

        def run_rank(rank: int) -> str:
            return str(
                run_alone(_run_rank, rank=rank, count=count, port=port, module=module, arguments=list(arguments))
            )

        with ThreadPoolExecutor(count) as pool:
            outputs = list(pool.map(run_rank, range(count)))
        shown.append(outputs[0])

    with patch("colossal_hetero.common.launch.start_ranks", start_ranks):
        result = CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.output
    (output,) = shown
    return output
