"""Draw the folders of the package and their imports into ``docs/architecture.md``, as a Mermaid diagram.

python -m tools.draw_rooms            write the diagram between the two markers of the page
python -m tools.draw_rooms --check    exit with status 1 if the page is out of date

An arrow A → B means that A imports B. Arrows that follow from others (A → B → C makes A → C redundant) are left out.
What a room is, and what a module imports, is read from ``tests/unit/test_rooms.py``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.paths import REPOSITORY
from tests.unit.test_rooms import MODULES, PACKAGE, imported, room_of

PAGE = REPOSITORY / "docs" / "architecture.md"
START, END = "<!-- rooms: start -->", "<!-- rooms: end -->"


def imports() -> dict[str, set[str]]:
    """By room: the other rooms that its modules import."""
    rooms = {module: room_of(module) for module in MODULES if room_of(module)}
    edges: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, room in rooms.items():
        edges[room] |= {rooms[name] for name in imported(module) if name in rooms} - {room}
    return edges


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The fewest edges with the same paths.

    Raises:
        graphlib.CycleError: rooms import each other in a circle.
    """
    below: dict[str, set[str]] = {}
    for room in TopologicalSorter(edges).static_order():
        below[room] = edges[room].union(*(below[other] for other in edges[room]))
    return {
        room: {other for other in others if not any(other in below[each] for each in others - {other})}
        for room, others in edges.items()
    }


def diagram() -> str:
    """The Mermaid text: a box per room, in a frame per folder that holds several rooms."""
    edges = reduced(imports())
    frames = defaultdict(list)
    for room in sorted(edges):
        frames[room.split("/")[0]].append(room)
    lines = ["```mermaid", "flowchart TD"]
    for folder, members in frames.items():
        if len(members) == 1:
            lines.append(f"  {_box(members[0])}")
        else:
            boxes = [f"    {_box(member)}" for member in members]
            lines += [f'  subgraph {folder}_frame["{folder}/"]', *boxes, "  end"]
    lines += [f"  {_name(room)} --> {_name(other)}" for room in sorted(edges) for other in sorted(edges[room])]
    return "\n".join([*lines, "```"])


def _name(room: str) -> str:
    return room.replace("/", "__")


def _box(room: str) -> str:
    label = f"{room}.py" if (REPOSITORY / PACKAGE / f"{room}.py").is_file() else room
    return f'{_name(room)}["{label}"]'


def updated(page: str) -> str:
    """The text of the page with the present diagram between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    if page.count(START) != 1 or page.count(END) != 1:
        raise ValueError(f"the page needs one line {START} and one line {END}")
    return re.sub(f"{START}.*{END}", lambda _: f"{START}\n{diagram()}\n{END}", page, flags=re.DOTALL)


def main(page: Path = PAGE) -> int:
    """Write or check the page; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the rooms of the package into docs/architecture.md.")
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    check = parser.parse_args().check
    before = page.read_text(encoding="utf-8")
    after = updated(before)
    if check and before != after:
        print("docs/architecture.md is out of date; run: python -m tools.draw_rooms", file=sys.stderr)
        return 1
    if not check:
        page.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
