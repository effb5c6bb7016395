"""The command ``colossal-hetero``: what can be planned without training. Starts without torch."""

from __future__ import annotations

import click

from . import __version__
from .commands.batches import batches
from .commands.checkpoint import checkpoint
from .commands.estimate import estimate
from .commands.launch import launch
from .commands.plan import plan
from .commands.probe import probe
from .commands.profile import profile
from .commands.replay import replay
from .commands.simulate import simulate
from .commands.store import store

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="colossal-hetero")
def main() -> None:
    """Plan and launch training on devices that are not equally fast, and look after checkpoints."""


for command in (probe, profile, estimate, plan, simulate, replay, batches, checkpoint, launch, store):
    main.add_command(command)


if __name__ == "__main__":
    main()
