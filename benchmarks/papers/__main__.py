"""Figures and tables of the five papers, with the papers' numbers beside ours.

python -m benchmarks.papers [PAPER [FIGURE ...]] [--data-dir DIR]

Without names it makes all of them (``make papers``). Each takes at most ten minutes on two cores, is printed, and
replaces its section in ``docs/papers.md``. What has been measured is kept in ``runs/papers`` and not repeated; remove
that folder to measure again. DIR holds images as train/CLASS/* and test/CLASS/*, for figures that train on images.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from benchmarks.papers.gpu_tables import DATA
from benchmarks.papers.page import Inputs, show

PAPERS = ("semi", "poplar", "adapt", "holmes", "autohet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", nargs="?", choices=PAPERS)
    parser.add_argument("figures", nargs="*", metavar="FIGURE")
    parser.add_argument("--data-dir", default="data/cifar10", help="[%(default)s]")
    parser.add_argument("--tables", type=Path, default=DATA, help="folder of published times of GPUs [%(default)s]")
    options = parser.parse_args()
    inputs = Inputs(options.data_dir, options.tables)
    for paper in [options.paper] if options.paper else PAPERS:
        figures = import_module(f"benchmarks.papers.{paper}").FIGURES
        if unknown := set(options.figures) - set(figures):
            parser.error(f"{paper} has no {', '.join(sorted(unknown))}; it has {', '.join(figures)}")
        for name in options.figures or figures:
            show(f"{paper} {name}", figures[name](inputs))


if __name__ == "__main__":
    main()
