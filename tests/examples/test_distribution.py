"""The wheel and the source distribution: built from the tracked files, valid, and with what belongs into them."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import colossal_hetero
from tests.support.paths import REPOSITORY

DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""Distributions by the name of a module, where the two differ."""
NAME = f"colossal_hetero-{colossal_hetero.__version__}"


def tracked_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.splitlines() if (REPOSITORY / name).is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("only a clone knows which files are tracked")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in tracked_files():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    run("build", "--no-isolation", "--outdir", str(built), str(source))
    return built


def run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(folder: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(folder / f"{NAME}-py3-none-any.whl")


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())


def test_both_are_valid_and_hold_the_package_and_all_tracked_files(folder: Path, wheel: zipfile.ZipFile) -> None:
    run("twine", "check", "--strict", *map(str, folder.iterdir()))
    expected = {name for name in tracked_files() if name.startswith("colossal_hetero/")}
    assert {name for name in wheel.namelist() if not name.startswith(f"{NAME}.dist-info/")} == expected
    assert {"colossal_hetero/py.typed", "colossal_hetero/__main__.py"} <= expected
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        names = {each.name.removeprefix(f"{NAME}/") for each in archive.getmembers() if each.isfile()}
    made = {"PKG-INFO", "setup.cfg"} | {name for name in names if ".egg-info/" in name}
    assert names - made == tracked_files() - {".gitignore"}


def test_the_commands_of_the_wheel_run(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    assert (
        "colossal-hetero = colossal_hetero.cli.main:main" in wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    )
    assert "plan" in run("colossal_hetero", "--help", folder=tmp_path)
    located = "import colossal_hetero, pathlib; print(pathlib.Path(colossal_hetero.__file__).parents[1])"
    done = subprocess.run([sys.executable, "-c", located], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() == tmp_path.resolve()


def test_links_of_the_description_work_everywhere(metadata: Message) -> None:
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert links and all(link.startswith("https://") for link in links)


@pytest.mark.parametrize(("sources", "extras"), [("colossal_hetero", {"", "plot"}), ("examples", {"", "examples"})])
def test_imported_packages_are_required(metadata: Message, sources: str, extras: set[str]) -> None:
    rows = [
        re.match(r"([\w-]+)[^;]*(?:; extra == [\"'](\w+)[\"'])?$", row) for row in metadata.get_all("Requires-Dist")
    ]
    required = {row[1] for row in rows if row is not None and (row[2] or "") in extras}
    imported: set[str] = set()
    for path in (REPOSITORY / sources).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module))
    roots = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names - {"colossal_hetero", "examples"}
    assert {DISTRIBUTIONS.get(name, name) for name in roots} <= required
