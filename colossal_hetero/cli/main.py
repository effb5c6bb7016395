"""The command ``colossal-hetero``: what can be planned without training. Starts without torch."""

import click

from .. import __version__
from .evaluate import batches, evaluate, simulate
from .jobs import checkpoint, store
from .plan import plan, rent
from .probe import probe
from .profile import estimate, profile


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="colossal-hetero")
def main() -> None:
    """Plan training on devices that are not equally fast, and look after checkpoints."""


for command in (probe, profile, estimate, plan, rent, evaluate, simulate, batches, checkpoint, store):
    main.add_command(command)


if __name__ == "__main__":
    main()
