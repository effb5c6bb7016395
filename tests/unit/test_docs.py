"""The documentation agrees with the code: links, code blocks, flags, fields, citations, the picture of the rooms."""

import ast
import contextlib
import dataclasses
import importlib
import io
import re
from collections.abc import Iterator

import click
import pytest
import yaml
from pydantic import BaseModel

import colossal_hetero
from colossal_hetero.balance.config import BalanceConfig
from colossal_hetero.checkpoint import records
from colossal_hetero.checkpoint.config import CheckpointConfig
from colossal_hetero.cli.main import main as cli
from colossal_hetero.data_parallel.config import BatchConfig
from colossal_hetero.elastic.config import ElasticConfig
from colossal_hetero.planner.batches import batch_profile
from colossal_hetero.planner.cluster import cluster_file, topology
from colossal_hetero.planner.cost import plan
from colossal_hetero.planner.profile import layer_profile
from colossal_hetero.plugin.plan_config import PlanConfig
from tests.support.paths import REPOSITORY
from tests.unit.test_rooms import RULES
from tools import draw_rooms, long_description

MAX_README_LINES = 160

PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(REPOSITORY.rglob("*.md"))
    if not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts)
}
SOURCES = [
    path for folder in ("colossal_hetero", "examples", "benchmarks", "tests", "tools")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]  # fmt: skip

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
BENCHMARK = re.compile(
    r"(?<![\w/])((?:tensor_parallel|data_parallel|pipeline|planner)(?:\.(?!py\b)[a-z]\w*){1,2})\b([^\n]*)"
)


def blocks(page: str, language: str | None = None) -> list[str]:
    return [text for kind, text in FENCE.findall(PAGES[page]) if language in (None, kind)]


def prose(page: str) -> str:
    return FENCE.sub("", PAGES[page])


def code(page: str) -> list[str]:
    return [line for block in blocks(page) for line in block.splitlines()] + INLINE.findall(prose(page))


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_the_targets_of_links_exist(page: str) -> None:
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (REPOSITORY / page).parent / file if file else REPOSITORY / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            name = path.resolve().relative_to(REPOSITORY.resolve()).as_posix()
            assert anchor in anchors(name), f"{page} links to {target}, but {name} has no such heading"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_compile_and_import_what_exists(page: str) -> None:
    for block in blocks(page, "python"):
        # This package imports Colossal-AI without the warnings of optional packages; a direct import prints them.
        packages = re.findall(r"^ *(?:from|import) (colossalai|colossal_hetero)\b", block, re.MULTILINE)
        assert packages == sorted(packages), f"{page}: {packages}"
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page}: {node.module} has no {alias.name}"


def test_make_targets_and_flags_of_commands_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    for page, line in LINES:
        shown = re.match(r"make ([a-z][\w-]*)", line)
        assert shown is None or shown[1] in targets, f"{page}: make {shown and shown[1]}"
        for name, rest in re.findall(r"colossal-hetero ([a-z]+)([^`|#]*)", line):
            command = cli.commands.get(name)
            assert command is not None, f"{page}: colossal-hetero {name}"
            parts = [command, *(command.commands.values() if isinstance(command, click.Group) else ())]
            known = {flag for part in parts for option in part.params for flag in option.opts}
            assert set(FLAG.findall(rest)) <= known | {"--help"}, f"{page}: {line}"


LINES = [(page, line) for page in PAGES for line in code(page)]


def flags_of_example(name: str, parser: str = "parse_options") -> set[str]:
    module = importlib.import_module(f"examples.{name}.options")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.raises(SystemExit):
        getattr(module, parser)(["--help"])
    return set(FLAG.findall(shown.getvalue()))


def test_flags_of_examples_and_benchmarks_exist() -> None:
    known = {path.parent.name: flags_of_example(path.parent.name) for path in REPOSITORY.glob("examples/*/train.py")}
    assert len(known) == 5
    for page, line in LINES:
        for name, rest in re.findall(r"examples/(\w+)/train\.py([^`|#]*)", line):
            assert set(FLAG.findall(rest)) <= known[name], f"{page}: {line}"
        for module, rest in BENCHMARK.findall(line):
            if f"colossal_hetero.{module}" in line:
                continue
            path = REPOSITORY.joinpath("benchmarks", *module.split(".")).with_suffix(".py")
            assert path.is_file(), f"{page}: {line}"
            text = path.read_text(encoding="utf-8")
            options = "".join(re.findall(r"read_options\((.*?)\)$", text, re.MULTILINE | re.DOTALL))
            for flag in set(FLAG.findall(rest)) - {"--help"}:
                assert f'"{flag}"' in text or f" {flag[2:].replace('-', '_')}=" in options, f"{page}: {line}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_named_python_files_exist(page: str) -> None:
    here = (REPOSITORY / page).parent
    for name in re.findall(r"(?<![\w./])[a-z_][a-z0-9_/]*\.py\b", "\n".join(INLINE.findall(prose(page)))):
        places = (here, REPOSITORY, REPOSITORY / "colossal_hetero")
        found = any((place / name).is_file() for place in places) or any(REPOSITORY.glob(f"[!.]*/**/{name}"))
        assert found, f"{page} names {name}"


def test_sources_cite_sections_that_exist_and_only_what_is_in_the_repository() -> None:
    numbers = set(re.findall(r"^#+ ([\d.]+?)\.? ", PAGES["docs/algorithms.md"], re.MULTILINE))
    elsewhere = re.compile(r"\b(ALGO" r"RITHMS\b|DES" r"IGN\.md|HO" r"USE\.md)")
    for path in (*SOURCES, *map(REPOSITORY.joinpath, PAGES)):
        name, text = path.relative_to(REPOSITORY), path.read_text(encoding="utf-8")
        found = elsewhere.search(text)
        assert not found, f"{name} cites {found and found[0]}"
        if path.suffix == ".py":
            text = re.sub(r"\s+#?\s*", " ", text)
            for cited in re.findall(r"docs/algorithms\.md`*,? (?:sections? )?(\d(?:\.\d)?)", text):
                assert cited in numbers, f"{name} cites section {cited} of docs/algorithms.md"


def file_parts(*modules: object) -> Iterator[tuple[str, str]]:
    """``(class, field as in the file)`` of the pydantic classes that the modules define."""
    for module in modules:
        for name, part in vars(module).items():
            if isinstance(part, type) and issubclass(part, BaseModel) and part.__module__ == module.__name__:  # type: ignore[attr-defined]
                yield from ((name, field.alias or each) for each, field in part.model_fields.items())


def test_every_field_of_the_files_and_every_setting_is_described() -> None:
    described = set(re.findall(r"`([a-z_0-9]+)`", PAGES["docs/file-formats.md"]))
    fields = [*file_parts(cluster_file, topology, batch_profile, layer_profile, plan, records)]
    assert len(fields) > 60
    # `kinds` of a cluster file are described by name.
    missing = [f"{part}.{field}" for part, field in fields if field not in described | {"kinds"}]
    assert not missing

    for config, page in (
        (BalanceConfig, "docs/tensor-parallel.md"),
        (BatchConfig, "docs/data-parallel.md"),
        (PlanConfig, "docs/planning.md"),
        (CheckpointConfig, "docs/checkpoints.md"),
        (ElasticConfig, "docs/elastic.md"),
    ):
        rows = re.findall(r"^\| `(\w+)` \|", PAGES[page], re.MULTILINE)
        assert not [field.name for field in dataclasses.fields(config) if field.name not in rows], page


def test_public_names_are_described_and_described_ones_exist() -> None:
    for package in ("", ".layers", ".balance", ".planner", ".testing"):
        for name in importlib.import_module(f"colossal_hetero{package}").__all__:
            assert f"`{name}`" in PAGES["docs/api.md"], f"colossal_hetero{package} exports {name}"
    for package, section in re.findall(
        r"^## `([\w.]+)`\n(.*?)(?=^## )", PAGES["docs/api.md"], re.MULTILINE | re.DOTALL
    ):
        rows = "".join(re.findall(r"^\| (.+?) \|", section, re.MULTILINE))
        for name in INLINE.findall(rows):
            assert hasattr(importlib.import_module(package), name), f"{package} has no {name}"


def test_the_picture_and_the_table_of_the_rooms_are_up_to_date() -> None:
    page = PAGES["docs/architecture.md"]
    assert draw_rooms.updated(page) == page, "run: python -m tools.draw_rooms"
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert draw_rooms.reduced(edges) == {"a": {"b"}, "b": {"c"}, "c": set()}
    rows = "\n".join(re.findall(r"^\| (`.+?) \|", page, re.MULTILINE))
    named = {name.removesuffix(".py").removesuffix("/") for name in INLINE.findall(rows)}
    assert named == set(RULES) - {"planner"}  # planner/ itself only re-exports names


def test_files_beside_the_package_are_up_to_date() -> None:
    described = long_description.described(PAGES["README.md"])
    assert described == PAGES["PYPI.md"], "run: python -m tools.long_description"
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and {"message", "title", "authors"} <= citation.keys()
    assert citation["version"] == colossal_hetero.__version__
    assert len(PAGES["README.md"].splitlines()) <= MAX_README_LINES
