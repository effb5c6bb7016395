"""The code blocks of README and ``docs/``. ``python -m tools.code_blocks`` runs their commands and shows below them
what they print (``make docs``).

A comment in the line above a block says more: ``<!-- not run: REASON -->``, or ``<!-- slow -->`` for commands that take
a minute or more. A block without a language below commands, or below a script, is their output.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
CUT = "…"
"""The last line of an output that is shown in part."""
WIDTHS = {"README.md": 80}
"""Columns of the terminal in which a page's commands print; in all other pages 160."""


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    mark: str
    start: int
    """Where the text starts and ends in the page."""
    end: int

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.page.read_text(encoding='utf-8')[: self.start].count(chr(10))}"

    @property
    def is_run(self) -> bool:
        return not self.mark.startswith("not run")

    @property
    def is_slow(self) -> bool:
        return self.mark == "slow"

    @property
    def is_script(self) -> bool:
        """True for a complete script, which torchrun starts."""
        return self.language == "python" and "launch_from_torch(" in self.text

    @property
    def commands(self) -> list[list[str]]:
        lines = self.text.splitlines() if self.language == "bash" else []
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [
        Block(
            page,
            each["language"],
            textwrap.dedent(each["text"]),
            each["mark"] or "",
            each.start("text"),
            each.end("text"),
        )
        for each in found
    ]


def outputs(page: Path) -> dict[Block, Block]:
    """Blocks that print something, and the block that shows it."""
    found = blocks(page)
    return {
        before: block
        for before, block in pairwise(found)
        if block.is_run and not block.language and (before.is_script or before.language == "bash")
    }


def prepare(folder: Path) -> None:
    """Make ``folder`` one in which the commands of a page can run."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")


def write_cluster(block: Block, folder: Path) -> None:
    """Write a block of TOML as the cluster file of the commands that follow; a part of a file gets what it lacks."""
    head = "" if "schema =" in block.text else 'schema = 1\n\n[[clusters]]\nname = "here"\n\n'
    (folder / "cluster.toml").write_text(head + block.text, encoding="utf-8")


def same_form(printed: str, shown: str) -> bool:
    """True if both are the same but for numbers, names of units and widths; ``shown`` may be cut."""
    return _form(printed)[: len(_form(shown))] == _form(shown)


def _form(output: str) -> list[str]:
    words = " ".join(output.replace(CUT, "").split())
    return re.sub(r"─+", "─", re.sub(r"(?<![\w.])[\d,]*\d[\d.]*( (m|µ)?s\b|%)?", "#", words)).split()


Run = Callable[[list[str], Path, Mapping[str, str]], str]
"""Runs a command (words, folder, changes of the environment) and returns what it prints."""


def run(page: Path, run_command: Run, slow: bool) -> Iterator[tuple[Block, str]]:
    """Run the commands and scripts of ``page`` in order, in one folder. Yields what each block of them prints."""
    environment = {"COLUMNS": str(WIDTHS.get(page.name, 160)), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for block in blocks(page):
            if not block.is_run or (block.is_slow and not slow):
                continue
            if block.language == "toml":
                write_cluster(block, folder)
            elif block.is_script:
                (folder / "train.py").write_text(block.text, encoding="utf-8")
                yield (
                    block,
                    run_command(["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"], folder, environment),
                )
            elif block.commands:
                yield block, "".join(run_command(words, folder, environment) for words in block.commands)


def run_process(words: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    modules = {"torchrun": "torch.distributed.run", "colossal-hetero": "colossal_hetero"}
    command = [sys.executable, "-m", modules[words[0]], *words[1:]]
    print("$", *words, flush=True)
    result = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{result.stderr}{result.stdout}")
    messages = [line for line in result.stderr.splitlines() if line.startswith("colossal_hetero: ")]
    return "\n".join([*messages, result.stdout])


def main() -> None:
    for page in PAGES:
        shown = outputs(page)
        if not shown:
            continue
        printed = {block: text for block, text in run(page, run_process, slow=True) if block in shown}
        content = page.read_text(encoding="utf-8")
        for block in reversed(list(printed)):
            output = shown[block]
            lines = [line.rstrip() for line in printed[block].splitlines()]
            if output.text.rstrip().endswith(CUT):
                lines = [*lines[: len(output.text.splitlines()) - 1], CUT]
            content = content[: output.start] + "\n".join(lines).strip("\n") + "\n" + content[output.end :]
        page.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
