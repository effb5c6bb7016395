"""A process is killed while it saves: does a whole checkpoint load, and the right one?

python -m benchmarks.checkpoint.torn_writes [--points 200] [--skip-operations]

Aim: always. First the process ends at every operation on files, in turn, with half of a write done; then it is killed
(SIGKILL) at random times. After each, the local and the shared folder load the step that was being saved or the one
before, bitwise, and the next save works and removes what was left. Half of the runs save a step again that is there.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

from benchmarks.common import print_table, read_options
from tests.support.torn_saves import check_killed, operations_of_a_save, seconds_of_a_save


def count(folder: Path, points: Iterable[float], check: Callable[[Path, float], str], kills: int) -> Counter[str]:
    """What was found after each of ``kills`` kills; errors are counted by their text. Saves that end before they are
    killed are checked, too, but do not count."""
    found: Counter[str] = Counter()
    for number, point in enumerate(points):
        root = folder / (f"{number} again" if number % 2 else str(number))
        root.mkdir(parents=True)
        try:
            result = check(root, point)
        except Exception as error:
            result = f"WRONG: {error}"
            print(f"WRONG at {point}: {error!r}", flush=True)
        if not result.endswith("finished"):
            found[result] += 1
        if sum(found.values()) == kills:
            break
    return found


def row(name: str, found: Counter[str]) -> tuple[object, ...]:
    right = sum(number for text, number in found.items() if not text.startswith("WRONG"))
    return name, f"{right} of {sum(found.values())}", found["30 killed"]


def main() -> None:
    arguments = read_options(__doc__, points=200, skip_operations=False)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "count").mkdir()
        operations = operations_of_a_save(folder / "count")
        if not arguments.skip_operations:
            points = [point for point in range(1, operations + 1) for _ in range(2)]
            found = count(
                folder / "operations",
                points,
                lambda root, point: check_killed(root, operation=int(point)),
                len(points),
            )
            rows.append(row(f"at each of {operations} operations on files, twice", found))
        roots = [folder / "time" / str(number) for number in range(5)]
        for root in roots:
            root.mkdir(parents=True)
        save_seconds = median(seconds_of_a_save(root) for root in roots)
        generator = random.Random(0)
        found = count(
            folder / "times",
            (generator.uniform(0, save_seconds) for _ in range(20 * arguments.points)),
            lambda root, point: check_killed(root, seconds=point),
            arguments.points,
        )
        rows.append(row("at random times", found))
    print_table(
        "Saves that are killed: one rank, a local and a shared folder, 8 layer tensors and 8 moments",
        ("killed", "a whole and right checkpoint loads", "of these the new one, locally"),
        rows,
    )


if __name__ == "__main__":
    main()
