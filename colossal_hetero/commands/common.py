"""What the subcommands share: errors in one line, a console, and paths that are checked before the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_outputs", "make_console", "mended_by_user"]


class CommandError(click.ClickException):
    """What a user can mend; one line, no traceback."""

    exit_code = 2


@contextmanager
def mended_by_user() -> Iterator[None]:
    """Show errors that the user can mend without a traceback."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        raise CommandError(" ".join(str(error).split())) from None


def make_console() -> Console:
    """A console whose tables keep their width in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140
    return console


def check_outputs(*paths: Path | None, picture: Path | None = None) -> None:
    """Raise unless these files can be written; ``picture`` must have a format that can be drawn."""
    for path in (*paths, picture):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    if picture is not None:
        from ..io.pictures import check_matplotlib, check_name

        check_name(picture)
        check_matplotlib()
