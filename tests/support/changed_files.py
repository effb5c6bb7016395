"""JSON files with a change, and the error messages of the functions that load them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Change = Callable[[Any], Any]
"""Changes the content of a file in place."""


def put(*place: Any, value: Any) -> Change:
    """A change that sets ``content[place[0]][place[1]]…`` to ``value``."""

    def change(content: Any) -> None:
        for part in place[:-1]:
            content = content[part]
        content[place[-1]] = value

    return change


def error_after(change: Change, path: Path, load: Callable[[Path], object]) -> str:
    """Change the file ``path``; returns the message of the ValueError that ``load`` must raise: one line, which begins
    with the path."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        load(path)
    message = str(error.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message
