"""Run ``colossal-hetero`` in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from colossal_hetero.cli.main import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def failure(*arguments: object) -> str:
    """The error message of a call that must fail: one line, without a traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit) and "Traceback" not in result.output
    (line,) = (line for line in result.output.splitlines() if line.startswith("Error: "))
    assert result.output.rstrip().endswith(line)
    return line
