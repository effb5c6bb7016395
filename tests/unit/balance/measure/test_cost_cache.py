"""Costs on disk: they are found again in the same context, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colossal_hetero.balance import Costs
from colossal_hetero.balance.pretest import CostCache
from colossal_hetero.common.atomic_files import default_folder

HERE = {"device": ["a CPU"], "ranks": 2, "shapes": ((512, 1024),)}
COSTS = Costs(0.01, 0.02, 1e-3, 2e-3, 1.1)


def test_the_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "colossal_hetero"
    CostCache(None).write(HERE, COSTS)
    assert CostCache(str(tmp_path / "colossal_hetero")).read(HERE) == COSTS
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "colossal_hetero"


def test_an_empty_name_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = CostCache("")
    cache.write(HERE, COSTS)
    assert cache.read(HERE) is None and cache.path(HERE) is None
    assert not list(tmp_path.iterdir())


def broken(content: dict) -> list[bytes]:
    other_schema = {**content, "schema": 0}
    other_place = {**content, "context": {**content["context"], "ranks": 3}}
    unknown_cost = {**content, "costs": {**content["costs"], "travel": 1.0}}
    impossible = {**content, "costs": {**content["costs"], "receive_factor": -1.0}}
    no_number = {**content, "costs": {**content["costs"], "receive_factor": "much"}}
    texts = [json.dumps(each) for each in (other_schema, other_place, unknown_cost, impossible, no_number, [], 3, {})]
    return [*(text.encode() for text in texts), b"", b"{", b"\xff\xfe\x00", json.dumps(content).encode()[:-20]]


def test_what_cannot_be_used_is_ignored_and_written_anew(tmp_path: Path) -> None:
    cache = CostCache(str(tmp_path))
    cache.write(HERE, COSTS)
    path = cache.path(HERE)
    assert path is not None
    for damage in broken(json.loads(path.read_text())):
        path.write_bytes(damage)
        assert cache.read(HERE) is None, damage
        cache.write(HERE, COSTS)
        assert cache.read(HERE) == COSTS


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.warns(UserWarning, match="disk full"):
        CostCache(str(tmp_path)).write(HERE, COSTS)
    assert not list(tmp_path.iterdir())
