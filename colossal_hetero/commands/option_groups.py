"""A command whose help shows its options in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

__all__ = ["GroupedCommand"]


class GroupedCommand(click.Command):
    """``groups``: the names of options by the title of their group; other options come last."""

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See ``click.Command.format_options``."""
        # Some versions of click have a record of arguments, too, which say nothing here.
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        left = {option.name: option.get_help_record(ctx) for option in options}
        for title, names in self._groups.items():
            records = [record for name in names if (record := left.pop(name)) is not None]
            with formatter.section(title):
                formatter.write_dl(records)
        others = [record for record in left.values() if record is not None]
        if others:
            with formatter.section("Other options"):
                formatter.write_dl(others)
