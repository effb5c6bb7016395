"""Files with absurd numbers or values of another type: each command succeeds or says in one line what is wrong."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from colossal_hetero.planner.batches.batch_profile import save_profile
from colossal_hetero.planner.cost.plan import save_plan
from colossal_hetero.planner.profile.layer_profile import save_profile as save_model_profile
from tests.support import command_line
from tests.support.batch_profiles import profile as batch_profile
from tests.support.plans import chunked, unequal
from tests.support.random_examples import examples
from tests.unit.commands.test_plan_command import CLUSTER
from tests.unit.commands.test_plan_command import profile as layer_profile

ABSURD = (
    *(1e308, -1e308, 5e-324, 1e-300, 0, -1, 1, 1e9, 2**31, 10**30, 10**400),
    *(0.5, "", "x", None, True, [], [1e308, 1e308, 1e308], [[]], {}),
)
NESTED = "[" * 100_000 + "]" * 100_000


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values, except in the middle of long lists."""
    if path:
        yield path
    if isinstance(content, dict):
        for key in content:
            yield from places(content[key], (*path, key))
    elif isinstance(content, list):
        for index in sorted({0, len(content) - 1} & set(range(len(content)))):
            yield from places(content[index], (*path, index))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    whole = part = copy.deepcopy(content)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return whole


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    paths = {name: folder / f"{name}.json" for name in ("profile", "plan", "chunks", "batches")} | {
        "cluster": folder / "cluster.toml"
    }
    paths["cluster"].write_text(CLUSTER)
    save_model_profile(layer_profile(), paths["profile"])
    save_plan(unequal(), paths["plan"])
    save_plan(chunked("zbv"), paths["chunks"])
    save_profile(batch_profile(), paths["batches"])
    return paths


def run(name: str, path: Path, files: dict[str, Path]) -> None:
    """Run the command that reads the file ``name``, from ``path`` instead of where the valid one is."""
    given = {**files, name: path}
    command: list[object] = ["plan", given["cluster"], given["profile"], "--global-batch", 16]
    if name == "batches":
        command = ["batches", given["batches"], "--global-batch", 64]
    elif name in ("plan", "chunks"):
        command = ["simulate", given[name]]
    result = command_line.run(*command)
    assert result.exception is None or isinstance(result.exception, SystemExit), (name, path.read_text()[:2000])
    assert result.exit_code == 0 or (result.exit_code == 2 and "Error: " in result.output), result.output


def content_of(path: Path) -> Any:
    text = path.read_text()
    return tomlkit.parse(text).unwrap() if path.suffix == ".toml" else json.loads(text)


def as_text(content: Any, path: Path) -> str:
    return tomlkit.dumps(content) if path.suffix == ".toml" else json.dumps(content)


@pytest.mark.parametrize("name", ["cluster", "profile", "plan", "chunks", "batches"])
@examples(ordinary=30, thorough=1000)
@given(st.data())
def test_absurd_values_give_no_traceback(name: str, files: dict[str, Path], data: st.DataObject) -> None:
    path = files[name]
    content = content_of(path)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(places(content))))
        content = changed(content, place, data.draw(st.sampled_from(ABSURD)))
    broken = path.with_stem(f"broken-{name}")
    try:
        broken.write_text(as_text(content, path))
    except (ValueError, TypeError):  # TOML has no null and no large integers.
        return
    run(name, broken, files)


@pytest.mark.parametrize("name", ["cluster", "profile", "plan", "batches"])
def test_deeply_nested_files_give_no_traceback(name: str, files: dict[str, Path]) -> None:
    path = files[name]
    broken = path.with_stem(f"nested-{name}")
    for text in (NESTED, f'{{"schema": 1, "x": {NESTED}}}'):
        broken.write_text(f"schema = 1\nx = {NESTED}" if path.suffix == ".toml" else text)
        run(name, broken, files)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_layer_that_takes_thirty_years_is_planned_with(files: dict[str, Path], way: str) -> None:
    """Rounding exceeds the limits of the exact method there, which searched the same region again and again."""
    content = changed(content_of(files["profile"]), ("times", 5, f"{way}_seconds", 0), 1e9)
    path = files["profile"].with_stem(f"long-{way}")
    path.write_text(as_text(content, path))
    run("profile", path, files)
