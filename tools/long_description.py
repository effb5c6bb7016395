"""``PYPI.md``, the description of the package where packages are listed: parts of ``README.md``, in which links into
the repository become the names of files. ``python -m tools.long_description`` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "PYPI.md"
ONLY_IN_A_CLONE = ("See it", "Links")
"""Sections that are of no use without the repository."""
LINK = r"\[([^\]]+)\]\((?!\w+://)([^)\s#]+)[^)\s]*\)"
"""A link into the repository: its text, and its file."""
END = "The files that are named here are in the source distribution, with the examples, benchmarks and tests.\n"


def described(readme: str) -> str:
    """The description for this text of ``README.md``."""
    parts = re.split(r"^(?=## )", readme, flags=re.MULTILINE)
    kept = "".join(part for part in parts if part.partition("\n")[0].removeprefix("## ") not in ONLY_IN_A_CLONE)
    without_marks = re.sub(r"^<!-- .* -->\n", "", kept, flags=re.MULTILINE)
    in_parentheses = re.sub(rf"\({LINK}\)", r"(\1: `\2`)", without_marks)
    return re.sub(LINK, r"\1 (`\2`)", in_parentheses) + END


def main() -> None:
    PAGE.write_text(described((REPOSITORY / "README.md").read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
