"""The command ``colossal-hetero``: what can be planned without training. Starts without torch."""

from __future__ import annotations

import click

from . import __version__
from .commands.jobs.checkpoint import checkpoint
from .commands.jobs.launch import launch
from .commands.jobs.store import store
from .commands.planning.batches import batches
from .commands.planning.compare import compare
from .commands.planning.evaluate import evaluate
from .commands.planning.plan import plan
from .commands.planning.simulate import simulate
from .commands.profiles.estimate import estimate
from .commands.profiles.probe import probe
from .commands.profiles.profile import profile

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="colossal-hetero")
def main() -> None:
    """Plan and launch training on devices that are not equally fast, and look after checkpoints."""


for command in (
    *(probe, profile, estimate),
    *(plan, evaluate, compare, simulate, batches),
    *(checkpoint, launch, store),
):
    main.add_command(command)


if __name__ == "__main__":
    main()
