"""``--hidden``, ``--depth``, ``--heads`` and ``--patch`` of the ZeRO and the pipeline example's vision transformer."""

from __future__ import annotations

import argparse

from .parser import IMAGE_SIZE, Options, UsageError, check_at_least_one

__all__ = ["VitSizeOptions", "add_vit_size_flags", "check_patch", "check_vit_sizes"]


class VitSizeOptions(Options):
    """A command line with these flags."""

    @property
    def vit_sizes(self) -> dict[str, int]:
        """All sizes by name."""
        return {name: getattr(self, name) for name in ("hidden", "depth", "heads", "patch")}


def add_vit_size_flags(parser: argparse.ArgumentParser, *, hidden: int, depth: int, heads: int, patch: int) -> None:
    """Add the flags, with these defaults."""
    model = parser.add_argument_group("model", "a vision transformer")
    for name, default, what in (
        ("hidden", hidden, "embedding width"),
        ("depth", depth, "blocks"),
        ("heads", heads, "attention heads"),
        ("patch", patch, f"patch size in pixels; images are {IMAGE_SIZE} × {IMAGE_SIZE}"),
    ):
        model.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{what} (default {default})")


def check_vit_sizes(options: VitSizeOptions) -> None:
    """Raise ``UsageError`` if there is no model of these sizes."""
    check_at_least_one(options, "hidden", "depth", "heads", "patch")
    check_patch(options.patch)
    if options.hidden % options.heads:
        raise UsageError(f"--heads {options.heads} does not divide --hidden {options.hidden}; use a divisor of it")


def check_patch(patch: int) -> None:
    """Raise ``UsageError`` if images cannot be cut into patches of ``patch`` × ``patch`` pixels."""
    if IMAGE_SIZE % patch:
        valid = ", ".join(str(size) for size in range(1, IMAGE_SIZE + 1) if IMAGE_SIZE % size == 0)
        raise UsageError(
            f"--patch {patch} does not divide the image size {IMAGE_SIZE} × {IMAGE_SIZE}; valid are {valid}"
        )
