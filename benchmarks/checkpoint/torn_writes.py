"""A process is killed while it saves: does a whole checkpoint load, and the right one?

python -m benchmarks.checkpoint.torn_writes [--points 200] [--skip-operations]

Aim: always. First the process ends at every operation on files, in turn, with half of a write done; then it is killed
(SIGKILL) at random times. After each, the local and the shared folder load the step that was being saved or the one
before, bitwise, and the next save works and removes what was left. Half of the runs save a step again that is there.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.common import print_table
from tests.support.torn_saves import check_killed, operations_of_a_save


def count(folder: Path, points: Iterable[float], check: Callable[[Path, float], str]) -> Counter[str]:
    """What was found after each kill; errors are counted by their text."""
    found: Counter[str] = Counter()
    for number, point in enumerate(points):
        root = folder / (f"{number} again" if number % 2 else str(number))
        root.mkdir(parents=True)
        try:
            found[check(root, point)] += 1
        except Exception as error:
            found[f"WRONG: {error}"] += 1
            print(f"WRONG at {point}: {error!r}", flush=True)
    return found


def row(name: str, found: Counter[str]) -> tuple[object, ...]:
    right = sum(number for text, number in found.items() if not text.startswith("WRONG"))
    killed = sum(number for text, number in found.items() if text.endswith("killed"))
    new = sum(number for text, number in found.items() if text == "30 killed")
    return name, f"{right} of {sum(found.values())}", killed, new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200, help="kills at random times")
    parser.add_argument("--skip-operations", action="store_true", help="only kill at random times")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "count").mkdir()
        start = time.perf_counter()
        operations = operations_of_a_save(folder / "count")
        longest = (time.perf_counter() - start) / 3  # of three saves, the last is interrupted
        if not arguments.skip_operations:
            found = count(
                folder / "operations",
                [point for point in range(1, operations + 1) for _ in range(2)],
                lambda root, point: check_killed(root, operation=int(point)),
            )
            rows.append(row(f"at each of {operations} operations on files, twice", found))
        generator = random.Random(arguments.seed)
        found = count(
            folder / "times",
            [generator.uniform(0, 1.2 * longest) for _ in range(arguments.points)],
            lambda root, point: check_killed(root, seconds=point),
        )
        rows.append(row(f"at random times, up to {1.2 * longest * 1000:.0f} ms", found))
    print_table(
        "Saves that are killed: one rank, a local and a shared folder, 8 layer tensors and 8 moments",
        ("killed", "a whole and right checkpoint loads", "killed before the end", "of these the new step is whole"),
        rows,
    )


if __name__ == "__main__":
    main()
