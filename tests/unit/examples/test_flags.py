"""Flags of the examples that cannot work are refused in one line: ``flags.txt`` has example, ranks, flags and words."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from examples.common.options import UsageError
from tests.support.paths import REPOSITORY
from tests.support.transcripts import missing_part, read_cases


@pytest.mark.parametrize(("line", "says"), read_cases(Path(__file__).with_name("flags.txt")))
def test_what_cannot_work_is_refused_in_one_line(line: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    example, ranks, *flags = line.split()
    module = importlib.import_module(f"examples.{example}.options")
    with pytest.raises(UsageError) as error:
        if example == "elastic":
            module.check_options(module.parse_demo_options(flags))
        else:
            module.check_options(module.parse_options(flags), int(ranks))
    message = str(error.value)
    assert "\n" not in message and missing_part(says, message) is None, message
